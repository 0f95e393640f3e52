"""The store for Google Cloud Storage, over its XML API: S3's requests with other headers.

Writes take no ETag as a precondition, but the generation, a number of each version. A HEAD finds the generation that
belongs to an ETag. The completion of a multipart upload takes none at all: a HEAD checks it first, not atomic.
"""

from collections.abc import Mapping
from types import MappingProxyType

from fusecache.model.objects import ObjectId
from fusecache.remote.http.http_store import XmlStore, text_of, whole_response
from fusecache.remote.protocol.headers import bare_etag
from fusecache.remote.store import Condition, ConditionalWrites

_GENERATION = "x-goog-generation"
_IF_GENERATION = "x-goog-if-generation-match"


class GcsStore(XmlStore):
    """A `Store` on a bucket of Google Cloud Storage. Thread-safe."""

    metadata_prefix = "x-goog-meta-"
    impossible = MappingProxyType({_IF_GENERATION: "1"})
    promise = ConditionalWrites.NOT_OF_PARTS

    def copy(
        self,
        source: ObjectId,
        key: str,
        *,
        condition: Condition | None = None,
        metadata: Mapping[str, str] | None = None,
        size: int | None = None,
    ) -> str:
        """Copy inside the bucket if the source is still that version; return the new ETag."""
        found = self._head(source.key)
        self._require_version(source.key, found, source.etag)
        headers = {
            "x-goog-copy-source": self._http.path(source.key).removeprefix("/"),
            "x-goog-metadata-directive": "COPY",
            **self._conditions(key, condition),
        }
        if metadata is not None:
            headers |= {"x-goog-metadata-directive": "REPLACE", **self._metadata_headers(metadata)}
        with self._named(f"COPY from {source.key!r}", key, "copies") as what, whole_response(what):
            headers["x-goog-copy-source-if-generation-match"] = found[_GENERATION]
            return bare_etag(text_of(self._http.call(what, "PUT", key, headers).body, "ETag"))

    # ---- private

    def _conditions(self, key: str, condition: Condition | None) -> dict[str, str]:
        if condition is None or not self._sends_conditions:
            return {}
        return {_IF_GENERATION: "0" if condition.etag is None else self._generation(key, condition.etag)}

    def _conditions_of_parts(self, key: str, condition: Condition | None) -> dict[str, str]:
        if condition is not None and self._sends_conditions:
            self._generation(key, condition.etag)
        return {}

    def _generation(self, key: str, etag: str | None) -> str:
        """Return the generation of a version; "0" for None: no object. Raises ObjectChanged if there is another."""
        found = self._head_of_version(key, etag)
        with whole_response(f"HEAD {self._place}/{key}"):
            return "0" if found is None else found[_GENERATION]
