"""What all sections of the configuration share."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

Auto = Literal["auto"]
Codec = Literal["none", "lossless", "fp8"]
S3_ADDRESS = r"s3://[a-z0-9][a-z0-9.-]+[a-z0-9](/.*)?"


class Section(BaseModel):
    """A key that it does not know is an error; a value never changes."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
