import pathlib
import stat
import traceback

import blake3
import pytest

from bridge.credentials import (
    CA,
    CERTIFICATE,
    KEY,
    TOKEN,
    TOKEN_FILE,
    Tls,
    Token,
    read_key_file,
    read_tls,
    read_token,
    without_secrets,
)

SECRET = "0123456789abcdef" * 4
HEADER = Token(SECRET).header


def test_token_shows_itself_nowhere():
    token = Token(SECRET)
    assert SECRET not in f"{token!r} {token} {[token]} "
    try:
        raise ValueError(token)
    except ValueError:
        assert SECRET not in traceback.format_exc()


@pytest.mark.parametrize("text", ["", "short", "x" * 31, "x" * 31 + "\n", "x" * 40 + "\r\nX: y", "é" * 40])
def test_token_that_can_be_guessed_or_does_not_travel_refused_without_telling_it(text):
    with pytest.raises(ValueError, match="32 or more printable ASCII") as caught:
        Token(text)
    assert not text or text not in str(caught.value)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer ",
        SECRET,
        f"Bearer {SECRET}",  # the token itself never travels
        HEADER[:-1],
        f"{HEADER}x",
        HEADER.replace("Bearer", "bearer"),
        HEADER.replace("Bearer", "Basic"),
        f"{HEADER} ",
        "Bearer \udcff\udc80",  # how a server hands on bytes that are no text
        "Bearer é",
    ],
)
def test_token_is_shown_by_its_own_header_alone(header):
    assert Token(SECRET).is_shown_by(HEADER)
    assert not Token(SECRET).is_shown_by(header)


def test_token_signs_a_message_and_no_other():
    signature = Token(SECRET).sign(b"manifest")
    assert Token(SECRET).has_signed(b"manifest", signature)
    for token, message, shown in (
        (Token(SECRET), b"manifesT", signature),
        (Token(SECRET[::-1]), b"manifest", signature),
        (Token(SECRET), b"manifest", signature[:-1]),
        (Token(SECRET), b"manifest", ""),
        (Token(SECRET), b"manifest", None),
    ):
        assert not token.has_signed(message, shown)
    assert signature != Token(SECRET).sign(b"manifest" * 2) and SECRET not in signature


def test_header_and_signature_tell_nothing_of_the_token_nor_of_each_other():
    header = HEADER.removeprefix("Bearer ")
    assert len(header) == 64 and header != Token(SECRET[::-1]).header.removeprefix("Bearer ")
    assert SECRET not in HEADER
    # Whoever saw the header and takes it for the token, or for its key, signs nothing.
    message = b"manifest"
    for forged in (Token(header).sign(message), blake3.blake3(message, key=bytes.fromhex(header)).hexdigest()):
        assert not Token(SECRET).has_signed(message, forged)


def test_read_token_takes_a_file_before_a_value_and_strips_its_line_end(tmp_path: pathlib.Path):
    file = tmp_path / "token"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o600)
    assert read_token({}) is None
    assert read_token({TOKEN: SECRET}) == Token(SECRET)
    assert read_token({TOKEN_FILE: str(file), TOKEN: "x" * 40}) == Token(SECRET)
    with pytest.raises(ValueError, match="cannot be read"):
        read_token({TOKEN_FILE: str(tmp_path / "none")})


def test_read_token_of_a_file_that_others_may_read_refused(tmp_path: pathlib.Path):
    file = tmp_path / "token"
    file.write_text(SECRET)
    for mode in (0o644, 0o640 | stat.S_IROTH, 0o602):
        file.chmod(mode)
        with pytest.raises(ValueError, match="chmod 600") as caught:
            read_token({TOKEN_FILE: str(file)})
        assert SECRET not in str(caught.value)
    for mode in (0o600, 0o400, 0o640):
        file.chmod(mode)
        assert read_token({TOKEN_FILE: str(file)}) == Token(SECRET)


def test_read_tls_refuses_half_a_pair_a_file_that_is_not_there_and_a_key_that_others_may_read(tmp_path: pathlib.Path):
    certificate, key = tmp_path / "server.pem", tmp_path / "server.key"
    certificate.write_text("x")
    key.write_text("x")
    key.chmod(0o600)
    with pytest.raises(ValueError, match="must both be set"):
        read_tls({CERTIFICATE: str(certificate)})
    with pytest.raises(ValueError, match="cannot be read"):
        read_tls({CA: str(tmp_path / "none")})
    assert read_tls({CERTIFICATE: str(certificate), KEY: str(key)}) == Tls(certificate=certificate, key=key)
    key.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        read_tls({CERTIFICATE: str(certificate), KEY: str(key)})


def test_without_secrets_leaves_what_a_child_needs():
    environ = {"PATH": "/bin", CA: "ca.pem", TOKEN: SECRET, TOKEN_FILE: "t", KEY: "k", "PGPASSWORD": "p"}
    assert without_secrets(environ) == {"PATH": "/bin", CA: "ca.pem"}
    assert without_secrets(environ, keep=(TOKEN_FILE,)) == {"PATH": "/bin", CA: "ca.pem", TOKEN_FILE: "t"}


def test_key_file_holds_one_key_that_no_error_tells(tmp_path):
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_text(f"{SECRET}\n")
    assert read_key_file(str(file)) == SECRET
    for content in (
        b"",
        b"  \n",
        f"{SECRET} {SECRET}".encode(),
        f"{SECRET}\n{SECRET}".encode(),
        b"\xff" + SECRET.encode(),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match="key") as caught:
            read_key_file(str(file))
        told = "".join(traceback.format_exception(caught.value))
        assert SECRET not in told
    file.write_text(SECRET)
    for mode in (0o604, 0o602):
        file.chmod(mode)
        with pytest.raises(ValueError, match="other users can read it"):
            read_key_file(str(file))
    with pytest.raises(ValueError, match="cannot be read"):
        read_key_file(str(tmp_path / "nowhere"))
