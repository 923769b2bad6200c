import pytest

# Its asserts are the suite's; without this they would fail without saying what they compared.
pytest.register_assert_rewrite("transport.sink_conformance")
