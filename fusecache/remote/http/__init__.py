"""HTTP for the data path, without botocore: connections, TLS, signed requests, ranged GET, PUT, DELETE."""
