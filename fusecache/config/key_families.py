"""Key families: the variables of one bucket and its keys, which begin with the same name.

`R2_DATASET_BUCKET_NAME`, `R2_DATASET_READ_ACCESS_KEY_ID` and others are the family `R2_DATASET`. No I/O.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fusecache.config.values import as_url
from fusecache.model.errors import ConfigError
from fusecache.remote.endpoints import Credentials, Endpoint, choose_endpoint

BUCKET_NAME, ACCOUNT_ID, ENDPOINT_URL = "BUCKET_NAME", "ACCOUNT_ID", "ENDPOINT_URL"
READ_KEYS = ("READ_ACCESS_KEY_ID", "READ_SECRET_ACCESS_KEY")
WRITE_KEYS = ("WRITE_ACCESS_KEY_ID", "WRITE_SECRET_ACCESS_KEY")


@dataclass(frozen=True, slots=True)
class KeyFamily:
    """One bucket and its keys. endpoint, read_keys, write_keys: None if a variable of theirs is missing.

    missing: the full names of the variables that are not set or empty. With ENDPOINT_URL, ACCOUNT_ID is not needed, and
    the other way round; without both, both are missing.
    """

    name: str
    bucket: str
    endpoint: Endpoint | None
    read_keys: Credentials | None
    write_keys: Credentials | None
    missing: tuple[str, ...]


def family_names(environment: Mapping[str, str]) -> list[str]:
    """Return the families of the environment that have a bucket and a key, such as R2_DATASET, sorted."""
    ends = f"_{BUCKET_NAME}"
    names = [
        each.removesuffix(ends)
        for each, value in environment.items()
        if each.endswith(ends) and value.strip()
    ]
    keys = (READ_KEYS[0], WRITE_KEYS[0])
    return sorted(name for name in names if name and any(environment.get(f"{name}_{each}") for each in keys))


def key_family(name: str, environment: Mapping[str, str]) -> KeyFamily:
    """Return the family `name` of the environment. Raises ConfigError for a malformed URL or account id."""
    values = {
        each: environment.get(f"{name}_{each}", "").strip()
        for each in (BUCKET_NAME, ACCOUNT_ID, ENDPOINT_URL, *READ_KEYS, *WRITE_KEYS)
    }
    missing = [each for each, value in values.items() if not value]
    if len({ACCOUNT_ID, ENDPOINT_URL} & set(missing)) == 1:
        missing = [each for each in missing if each not in (ACCOUNT_ID, ENDPOINT_URL)]
    return KeyFamily(
        name,
        values[BUCKET_NAME],
        _endpoint(name, values[ENDPOINT_URL], values[ACCOUNT_ID]),
        _credentials(values, READ_KEYS),
        _credentials(values, WRITE_KEYS),
        tuple(f"{name}_{each}" for each in missing),
    )


def _endpoint(name: str, url: str, account: str) -> Endpoint | None:
    if not url and not account:
        return None
    try:
        return choose_endpoint({"R2_ACCOUNT_ID": account}, endpoint_url=as_url(url) if url else None)
    except (ConfigError, ValueError) as exc:
        variable = f"{name}_{ENDPOINT_URL if url else ACCOUNT_ID}"
        raise ConfigError(
            f"{variable}: {exc if isinstance(exc, ConfigError) else f'allowed is {exc}'}"
        ) from None


def _credentials(values: Mapping[str, str], names: tuple[str, str]) -> Credentials | None:
    access_key, secret_key = (values[each] for each in names)
    return Credentials(access_key, secret_key) if access_key and secret_key else None
