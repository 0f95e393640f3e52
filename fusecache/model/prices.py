"""What stores bill for requests. Not here: storage (`policy/checkpoints.py`) and traffic."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prices:
    """Dollars per million requests. Class A: LIST, and all that writes except deletes, which are free. B: GET, HEAD.

    name: ends `about $1.20 at …`.
    """

    name: str
    class_a: float
    class_b: float


# The price lists of the two stores, as of 2025; both bill by the same classes.
R2_PRICES = Prices("R2's prices, before its free tier", 4.50, 0.36)
AWS_PRICES = Prices("the prices of S3 Standard in us-east-1, without traffic", 5.00, 0.40)
