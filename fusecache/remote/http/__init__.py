"""HTTP for the data path: connections, TLS, signed requests, ranged GET, PUT."""
