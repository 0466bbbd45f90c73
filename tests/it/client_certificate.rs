//! Client certificates: a platform accepts a certificate of its CA; a missing, foreign or unusable certificate is
//! reported and nothing is changed.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection, Stream, SupportedProtocolVersion};

use crate::fixtures::certificates::{Authority, Pair};
use crate::http::{NOTHING_RUNS, Request};
use crate::support::{GOOD, Tree, abide, stderr, stdout};

/// A server that accepts clients with a certificate of this authority, until the tests end.
fn serve(authority: &Authority, version: &'static SupportedProtocolVersion) -> SocketAddr {
    let der = |pem: &str| CertificateDer::from_pem_slice(pem.as_bytes()).expect("a certificate");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = RootCertStore::empty();
    roots.add(der(&authority.pem)).expect("a root");
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
    let own = authority.sign("127.0.0.1");
    let key = PrivateKeyDer::from_pem_slice(own.key.as_bytes()).expect("a key");
    let config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[version])
        .expect("versions")
        .with_client_cert_verifier(verifier.build().expect("a verifier"))
        .with_single_cert(vec![der(&own.certificate)], key)
        .expect("a configuration");
    let config = Arc::new(config);
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let connection = ServerConnection::new(Arc::clone(&config)).expect("a connection");
            std::thread::spawn(move || answer(stream, connection));
        }
    });
    address
}

/// What the documents say of one process that is not there, on a host with an agent.
fn answer(mut socket: TcpStream, mut connection: ServerConnection) -> Option<()> {
    socket.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
    while let Some(request) = Request::read(&mut Stream::new(&mut connection, &mut socket)) {
        let data = match request.path.as_str() {
            "/api/c/compapi/v2/gse/get_proc_status_v2/" => r#"{"proc_infos": []}"#,
            "/api/c/compapi/v2/gse/get_agent_status/" => {
                r#"{"0:10.0.0.1": {"ip": "10.0.0.1", "bk_cloud_id": 0, "bk_agent_alive": 1, "version": "1.60.77"}}"#
            }
            "/api/c/compapi/v2/gse/operate_proc_multi/" => r#"{"task_id": "1"}"#,
            "/api/c/compapi/v2/gse/get_proc_operate_result_v2/" => NOTHING_RUNS,
            _ => "null",
        };
        let body = format!(r#"{{"result": true, "code": 0, "message": "success", "data": {data}}}"#);
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
        Stream::new(&mut connection, &mut socket).write_all((head + &body).as_bytes()).ok()?;
    }
    // Its refusal of a client is read before the connection closes.
    while connection.wants_write() {
        connection.write_tls(&mut socket).ok()?;
    }
    socket.shutdown(Shutdown::Write).ok()?;
    std::io::copy(&mut socket.take(1 << 20), &mut std::io::sink()).ok().map(|_| ())
}

/// `plan` at an address with this line in the config file: its exit code and its output.
fn plan(at: SocketAddr, authority: &Authority, pem: &str, more: &str) -> (i32, String) {
    let config = format!(
        "targets: {{it: {{url: \"https://{at}\", dialect: gse-v2, ca_file: ca.pem, {more} auth: {{app_code: esb_test, app_secret: {{file: secret}}}}}}}}\n"
    );
    let files = [
        ("abide.yaml", config.as_str()),
        ("ca.pem", authority.pem.as_str()),
        ("me.pem", pem),
        ("secret", "s3cret"),
        ("m/api.yaml", &GOOD.replace("control: {", "control: {stop_cmd: ./stop, ")),
    ];
    let tree = Tree::new(&files);
    let output = abide(&["plan", "m", "--target", "it"], tree.path(), b"");
    (output.status.code().unwrap_or(-1), stdout(&output) + &stderr(&output))
}

const VERSIONS: [&SupportedProtocolVersion; 2] = [&rustls::version::TLS12, &rustls::version::TLS13];

#[test]
fn a_client_certificate_of_the_ca_is_accepted() {
    let authority = Authority::new("the CA");
    let Pair { certificate, key } = authority.sign("abide");
    for version in VERSIONS {
        let at = serve(&authority, version);
        // In either order: people put the two together with `cat`.
        for pem in [format!("{certificate}{key}"), format!("{key}{certificate}")] {
            let (code, told) = plan(at, &authority, &pem, "client_cert: me.pem,");
            assert!(code == 0 && told.contains("1 to start"), "{version:?}: {code}: {told}");
        }
    }
}

#[test]
fn a_missing_or_foreign_client_certificate_is_reported() {
    let authority = Authority::new("the CA");
    let Pair { certificate, key } = Authority::new("another CA").sign("abide");
    let others = format!("{certificate}{key}");
    for version in VERSIONS {
        let at = serve(&authority, version);
        for (pem, more, says) in [
            (
                "",
                "",
                "the server requires a client certificate and received none (TLS alert CertificateRequired)",
            ),
            (
                others.as_str(),
                "client_cert: me.pem,",
                "the server rejected our client certificate (TLS alert UnknownCA)",
            ),
        ] {
            let (code, told) = plan(at, &authority, pem, more);
            let meant = format!(
                "error: target it: the target cannot be reached: {says}\nhint: target it is defined in abide.yaml"
            );
            assert_eq!((code, told.trim()), (69, meant.as_str()), "{version:?}");
        }
    }
}

#[test]
fn an_unusable_certificate_file_is_reported_before_any_request() {
    let authority = Authority::new("the CA");
    let Pair { certificate, key } = authority.sign("abide");
    // No server listens at this address: a connection would fail with another error.
    let nobody = SocketAddr::from((Ipv4Addr::LOCALHOST, 9));
    let (both, mixed) = (format!("{certificate}{key}"), format!("{certificate}{}", authority.sign("x").key));
    let half = "cannot use the client certificate me.pem: the file must contain a certificate and its key, both in PEM";
    let cannot = "cannot use the client certificate";
    for (pem, more, says) in [
        (&both, "client_cert: gone.pem,", &*format!("{cannot} gone.pem: No such file or directory")),
        (&String::new(), "client_cert: me.pem,", half),
        (&"nonsense".to_owned(), "client_cert: me.pem,", half),
        (&certificate, "client_cert: me.pem,", half),
        (&key, "client_cert: me.pem,", half),
        (&mixed, "client_cert: me.pem,", &*format!("{cannot} me.pem: keys may not be consistent")),
        (&both, "proxy: \"http://[\",", "the proxy cannot be used: "),
    ] {
        let (code, told) = plan(nobody, &authority, pem, more);
        let meant = format!("error: target \"it\": {says}");
        assert!(code == 64 && told.starts_with(&meant), "{code}: {told}");
    }
    for (pem, says) in [
        ("", "ca.pem contains no certificate"),
        ("-----BEGIN CERTIFICATE-----\n?", "cannot read the certificate ca.pem: "),
    ] {
        let (code, told) = plan(nobody, &Authority { pem: pem.to_owned(), ..Authority::new("x") }, &both, "");
        assert!(code == 64 && told.starts_with(&format!("error: target \"it\": {says}")), "{code}: {told}");
    }
}
