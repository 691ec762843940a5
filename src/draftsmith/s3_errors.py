"""What a failed request to an object store means, and what the user can do about it."""

import re

from obstore import exceptions as failures

from draftsmith.core import Damaged, UserError

NO_COPY = "invalid multipart response"  # of a server that copies no parts
FAILURES = (failures.BaseError, OSError)  # some of obstore's are Python's own


def is_missing(error: Exception) -> bool:
    """Whether the object, not the bucket, is not there."""
    no_object = isinstance(error, failures.NotFoundError | FileNotFoundError)
    return no_object and "NoSuchBucket" not in str(error)


def passing(error: Exception) -> bool:
    """Whether trying again may help: no answer, or a server's own failure."""
    if not isinstance(error, failures.GenericError):
        return False
    return not any(words in str(error) for words in ("status 4", "status: 4", NO_COPY, "501 Not"))


def forgotten(error: Exception) -> bool:
    """Whether the server no longer has what it took of an upload: one that was killed and started anew
    may have lost a part, or all.
    """
    return is_missing(error) or any(
        words in str(error) for words in ("InvalidPart", "NoSuchUpload")
    )


SAID = (
    # words of the answer; what they mean; what to do
    ("NoSuchBucket", "no such bucket", "Create the bucket, or correct the address."),
    ("InvalidAccessKeyId", "an unknown access key", "Correct AWS_ACCESS_KEY_ID."),
    ("SignatureDoesNotMatch", "a wrong signature", "Correct AWS_SECRET_ACCESS_KEY."),
    ("InvalidSignature", "a wrong signature", "Correct AWS_SECRET_ACCESS_KEY."),
    ("ExpiredToken", "expired credentials", "Renew the session's credentials."),
    ("PermanentRedirect", "a bucket of another region", "Set AWS_REGION to the bucket's."),
    ("AuthorizationHeaderMalformed", "another region", "Set AWS_REGION to the bucket's."),
    (
        NO_COPY,
        "a server without multipart copy (UploadPartCopy)",
        "Lower extract.shard_bytes below 60 MB, or use a server that knows it.",
    ),
    ("169.254", "no credentials", "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."),
)


def explain(error: Exception, where: str, bucket: str) -> UserError:
    """The error for the user."""
    text = " ".join(str(error).partition("Debug source")[0].split())
    answer = re.search(r"<Code>(.+?)</Code>(?:\s*<Message>(.+?)</Message>)?", text)
    said = ": ".join(filter(None, answer.groups())) if answer else text[:300]
    for words, meaning, remedy in SAID:
        if words in text:
            return UserError(
                where=where,
                found=f"{meaning} ({bucket})",
                expected="an S3 bucket that these credentials may use",
                remedy=remedy,
            )
    if is_missing(error):
        return Damaged.file(where, "no such object")
    if isinstance(error, failures.PermissionDeniedError | failures.UnauthenticatedError):
        return UserError(
            where=where,
            found=f"access denied ({text[:200]})",
            expected="a key that may list, read and write there",
            remedy="Check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and the bucket's policy.",
        )
    return UserError(
        where=where,
        found=f"no usable answer from the object store ({said})",
        expected="an S3 server",
        remedy="Check AWS_ENDPOINT_URL, AWS_REGION and the network; the same command goes on from "
        "what is stored.",
    )
