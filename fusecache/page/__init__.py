"""The web page of a mount: what a status says as HTML, with curves of the last hour."""
