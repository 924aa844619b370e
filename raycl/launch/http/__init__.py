"""HTTP servers of one machine: addresses, limits on connections, and the files that pages share."""
