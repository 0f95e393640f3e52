"""The HTTP client of all stores: connections, proxies, TLS, signed requests; and what the stores share."""
