"""TLS both ways: whom the client trusts, and who it is; with throw-away certificates and the frontend's own handlers."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import pytest
from trivet_chassis.rpc import ErrorInterceptor
from trivet_client import RetryPolicy, SamplingParams, Tls, UnavailableError
from trivet_frontend.rpc import KeyInterceptor, PublicInference
from trivet_proto.v1 import inference_pb2_grpc

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with the openssl command")

ONCE = RetryPolicy(attempts=1)


@dataclass(frozen=True)
class Certificates:
    """PEM files: an authority, a server `trivet.test` and a client, each with its key."""

    folder: Path

    def path(self, name: str) -> Path:
        return self.folder / name

    def read(self, name: str) -> bytes:
        return self.path(name).read_bytes()


def openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True, timeout=30)


@pytest.fixture(scope="module")
def certificates() -> Iterator[Certificates]:
    with tempfile.TemporaryDirectory(prefix="trivet-") as name:
        made = Certificates(Path(name))
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
        openssl("req", "-x509", *key, "-days", "2", "-subj", "/CN=authority", "-keyout", made.path("ca.key"), "-out", made.path("ca.pem"))
        signed = ("-CA", made.path("ca.pem"), "-CAkey", made.path("ca.key"), "-days", "2")
        for party, alias in (("server", "trivet.test"), ("client", "client.test")):
            subject = ("-subj", f"/CN={alias}", "-addext", f"subjectAltName=DNS:{alias}")
            files = ("-keyout", made.path(f"{party}.key"), "-out", made.path(f"{party}.pem"))
            openssl("req", "-x509", *key, *signed, *subject, *files)
        yield made


@pytest.fixture(params=[False, True], ids=["server only", "both ways"])
def mutual(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def secure_address(backend, background, certificates: Certificates, mutual: bool) -> Iterator[str]:
    async def started() -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server(interceptors=[ErrorInterceptor(), KeyInterceptor(("secret",))])
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(PublicInference(backend.frontend.inference), server)
        pairs = [(certificates.read("server.key"), certificates.read("server.pem"))]
        credentials = grpc.ssl_server_credentials(pairs, certificates.read("ca.pem"), require_client_auth=mutual)
        port = server.add_secure_port("127.0.0.1:0", credentials)
        await server.start()
        return server, port

    server, port = background.run(started())
    yield f"127.0.0.1:{port}"
    background.run(server.stop(0))


async def test_calls_go_over_tls_with_the_key(secure_address: str, certificates: Certificates, mutual: bool, connect) -> None:
    tls = Tls(
        root_certificates=certificates.path("ca.pem"),
        certificate_chain=certificates.path("client.pem") if mutual else None,
        private_key=certificates.path("client.key") if mutual else None,
        server_name="trivet.test",
    )
    side = connect(secure_address, tls=tls, api_key="secret")
    assert (await side.call("chat", "Hello", SamplingParams(max_tokens=2))).text
    assert await side.call("models")


async def test_who_is_not_trusted_is_not_talked_to(secure_address: str, certificates: Certificates, mutual: bool, connect) -> None:
    trusted = certificates.path("ca.pem")
    wrong = [
        None,  # plain text to a TLS port
        Tls(root_certificates=trusted),  # the certificate is another name's
        Tls(root_certificates=certificates.path("client.pem"), server_name="trivet.test"),
    ]
    if mutual:
        wrong.append(Tls(root_certificates=trusted, server_name="trivet.test"))  # the server asks who we are
    for tls in wrong:
        side = connect(secure_address, tls=tls, api_key="secret", retry=ONCE)
        with pytest.raises(UnavailableError):
            await side.call("models")
