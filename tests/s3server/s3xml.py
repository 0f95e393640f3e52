"""The XML that S3 speaks: small elements out, small documents in."""

import xml.etree.ElementTree as ET
from collections.abc import Iterable
from xml.sax.saxutils import escape

from tests.s3server.errors import S3Error

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"


def element(name: str, *children: str) -> str:
    """Return an element of children that are XML already."""
    return f"<{name}>{''.join(children)}</{name}>"


def text(name: str, value: object) -> str:
    """Return an element that holds text; True and False as XML has them."""
    words = str(value).lower() if isinstance(value, bool) else str(value)
    return f"<{name}>{escape(words, {chr(13): '&#13;'})}</{name}>"


def document(name: str, children: Iterable[str]) -> bytes:
    """Return a whole answer."""
    body = "".join(children)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<{name} xmlns="{NAMESPACE}">{body}</{name}>'.encode()


def error_document(
    code: str, message: str, resource: str, request_id: str, details: Iterable[tuple[str, str]] = ()
) -> bytes:
    """Return the body of an error answer."""
    body = text("Code", code) + text("Message", message)
    body += text("Resource", resource) + text("RequestId", request_id)
    body += "".join(text(name, value) for name, value in details)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<Error>{body}</Error>'.encode()


def parse(body: bytes, root: str) -> ET.Element:
    """Return the root element with namespaces removed. S3Error MalformedXML if it is not `root`."""
    try:
        tree = ET.fromstring(body)
    except ET.ParseError as exc:
        raise S3Error("MalformedXML", str(exc)) from exc
    for node in tree.iter():
        node.tag = node.tag.rpartition("}")[2]
    if tree.tag != root:
        raise S3Error("MalformedXML", f"{root} expected, not {tree.tag}")
    return tree


def child_text(node: ET.Element, name: str) -> str:
    """Return the text of a child. S3Error MalformedXML if there is none."""
    value = node.findtext(name)
    if value is None:
        raise S3Error("MalformedXML", f"no {name} in {node.tag}")
    return value
