"""Data: from files of many formats to token batches that are the same for any number of workers.

A row passes through `source` (a file somewhere) -> `formats` (rows) -> `ingest` (checked, cached as Arrow) ->
`selection` (dev split, sampling) -> `prompts` and `prepare` (token ids, memory-mapped) -> `loader` (batches). `stream`
puts these together; `benchmarks`, `knowledge` and `layout` know the public benchmarks. Does not depend on models (a
tokenizer is a `TextCodec`), methods or Ray.
"""
