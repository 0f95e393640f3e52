"""What a refused call says."""

from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import ClientError


def refusal(call: Callable[..., Any], **arguments: Any) -> tuple[int, str]:
    """Return (HTTP status, error code) of a call that must be refused."""
    with pytest.raises(ClientError) as caught:
        call(**arguments)
    response = caught.value.response
    return response["ResponseMetadata"]["HTTPStatusCode"], response["Error"]["Code"]
