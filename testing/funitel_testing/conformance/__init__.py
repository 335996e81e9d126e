"""TGI's contract as data: each row a request and what the answer must be, walked against a live server."""

from funitel_testing.conformance.native import NATIVE
from funitel_testing.conformance.openai import OPENAI
from funitel_testing.conformance.routes import ROUTE_ROWS

ROWS = NATIVE + ROUTE_ROWS + OPENAI

__all__ = ["ROWS"]
