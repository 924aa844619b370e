"""Files behind one interface: local paths and URIs (`s3://`, `gs://`, `hdfs://`) through pyarrow.fs.

Readers, the run's journal and the adapter bank all need "read", "write so that it is whole or absent" and "create, or
fail if the file exists". pyarrow.fs has no conditional put: two writers would overwrite each other without an error, so
exclusive creation is done by the operating system on local disk, by S3's `If-None-Match` through boto3, and by
`ifGenerationMatch=0` through Google's client. Every failure leaves here as a StorageError that names the URI.
"""

from raycl.storage.folder import Storage, StoredFile

__all__ = ["Storage", "StoredFile"]
