//! HTTP server: connections within limits, with timeouts for the handshake, each header and each write.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::process::{Resource as Limited, Rlimit, getrlimit, setrlimit};
use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_rustls::TlsAcceptor;
use tracing::{debug, warn};

use super::connections::{Connection, Connections};
use super::service::ConnectionService;
use super::tls::Tls;
use super::write_timeout::WriteTimeout;

/// Remote address of a connection, attached to every request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer(pub SocketAddr);

/// Security of a connection, attached to every request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TransportSecurity {
    pub tls: bool,
    /// The client's certificate in DER. Its chain was verified in the handshake.
    pub client_certificate: Option<CertificateDer<'static>>,
}

/// Socket and settings of a listener.
pub struct Listener {
    pub socket: TcpListener,
    pub tls: Option<Tls>,
    /// Maximum connections. New ones evict unauthenticated ones; known callers above this number are refused.
    pub connections: usize,
    /// Timeout of each request's header, and of an idle connection between requests.
    pub header_time: Duration,
    /// JSON body of the 503 for a connection that finds no room, before its request is read.
    pub overload_body: String,
}

/// Maximum bytes of a header.
const HEADER_BYTES: usize = 64 << 10;
/// Timeout of a new connection's handshake, and of its first header.
const FIRST_HEADER_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time that one write may block on a peer that does not read.
const WRITE_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum time for requests in flight to finish at shutdown.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);
/// Backlog of connections to accept; the kernel caps it at net.core.somaxconn.
const BACKLOG: u32 = 4096;
/// Maximum concurrent 503 responses to refused connections; beyond it a connection is closed without one.
const MAX_REJECTIONS: usize = 64;
/// Minimum interval between log lines about failed accepts.
const LOG_INTERVAL: Duration = Duration::from_secs(5);

/// Listens with a backlog that holds a burst of connections.
pub fn bind(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // A restarted listener can bind its former port immediately.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Raises the soft limit of open files to the hard one, since each connection needs a descriptor. Must not be called
/// by a process whose children inherit the limit.
pub fn raise_file_limit() {
    let limit = getrlimit(Limited::Nofile);
    if limit.current != limit.maximum
        && let Err(error) = setrlimit(Limited::Nofile, Rlimit { current: limit.maximum, ..limit })
    {
        debug!(%error, "cannot raise the limit of open files");
    }
}

/// Caps connections so that a quarter of the descriptors stays free for other uses.
fn within_file_limit(connections: usize) -> usize {
    let files = getrlimit(Limited::Nofile).current.and_then(|limit| usize::try_from(limit).ok());
    files.map_or(connections, |files| connections.min(files - files / 4)).max(1)
}

/// Serves until `stop` is true, then finishes requests in flight.
pub async fn serve(listener: Listener, router: Router, mut stop: watch::Receiver<bool>) {
    let Listener { socket, tls, connections, header_time, overload_body } = listener;
    let overload_body: Arc<str> = overload_body.into();
    let connections = Connections::new(within_file_limit(connections));
    let refusals = Arc::new(Semaphore::new(MAX_REJECTIONS));
    let (alive, mut all_ended) = mpsc::channel::<()>(1);
    let mut logged: Option<Instant> = None;
    loop {
        let accepted = tokio::select! {
            accepted = socket.accept() => accepted,
            () = stop_requested(&mut stop) => break,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                if logged.is_none_or(|at| at.elapsed() > LOG_INTERVAL) {
                    logged = Some(Instant::now());
                    warn!(%error, "cannot accept a connection");
                }
                // The usual cause is a lack of descriptors: evicting a silent connection frees one.
                connections.evict_one();
                tokio::time::sleep(Duration::from_millis(10)).await;
                continue;
            }
        };
        let Some(connection) = connections.admit(peer) else {
            if let Ok(permit) = Arc::clone(&refusals).try_acquire_owned() {
                let body = Arc::clone(&overload_body);
                tokio::spawn(async move {
                    reject_overloaded(stream, &body).await;
                    drop(permit);
                });
            }
            continue;
        };
        let acceptor = tls.as_ref().map(|tls| TlsAcceptor::from(tls.config()));
        let serving = ConnectionContext { router: router.clone(), header_time, stop: stop.clone() };
        let alive = alive.clone();
        tokio::spawn(async move {
            let _ = stream.set_nodelay(true);
            tokio::select! {
                () = serving.handshake(acceptor, stream, &connection) => {}
                () = connection.evicted() => debug!(%peer, "evicted an unauthenticated connection"),
            }
            drop(alive);
        });
    }
    drop(alive);
    let _ = tokio::time::timeout(SHUTDOWN_TIMEOUT, all_ended.recv()).await;
}

/// Router and timeouts of one connection.
struct ConnectionContext {
    router: Router,
    header_time: Duration,
    stop: watch::Receiver<bool>,
}

impl ConnectionContext {
    fn first_header_timeout(&self) -> Duration {
        FIRST_HEADER_TIMEOUT.min(self.header_time)
    }

    async fn handshake(self, acceptor: Option<TlsAcceptor>, stream: TcpStream, connection: &Connection) {
        let peer = connection.peer();
        let Some(acceptor) = acceptor else {
            return self.serve(stream, connection, TransportSecurity::default()).await;
        };
        match tokio::time::timeout(self.first_header_timeout(), acceptor.accept(stream)).await {
            Ok(Ok(stream)) => {
                let chain = stream.get_ref().1.peer_certificates();
                let client_certificate = chain.and_then(<[_]>::first).map(|leaf| leaf.clone().into_owned());
                self.serve(stream, connection, TransportSecurity { tls: true, client_certificate }).await;
            }
            Ok(Err(error)) => debug!(%peer, %error, "TLS handshake failed"),
            Err(_) => debug!(%peer, "TLS handshake timed out"),
        }
    }

    async fn serve(
        mut self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        connection: &Connection,
        security: TransportSecurity,
    ) {
        let peer = connection.peer();
        let first = tokio::time::sleep(self.first_header_timeout());
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(self.header_time).max_buf_size(HEADER_BYTES);
        let service = ConnectionService::new(self.router, connection.clone(), security);
        let serving = http.serve_connection(TokioIo::new(WriteTimeout::new(stream, WRITE_TIMEOUT)), service);
        tokio::pin!(serving, first);
        let mut is_first = true;
        let ended = loop {
            tokio::select! {
                ended = serving.as_mut() => break ended,
                () = first.as_mut(), if is_first => {
                    is_first = false;
                    if !connection.has_begun() {
                        debug!(%peer, "no request header before the timeout");
                        return;
                    }
                }
                () = stop_requested(&mut self.stop) => {
                    serving.as_mut().graceful_shutdown();
                    break serving.await;
                }
            }
        };
        if let Err(error) = ended {
            debug!(%peer, %error, "connection failed");
        }
    }
}

/// Waits for the stop request; a dropped sender counts as one.
async fn stop_requested(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}

/// Writes a 503 response without reading a request.
async fn reject_overloaded(mut stream: TcpStream, body: &str) {
    let answer = format!(
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let _ = tokio::time::timeout(Duration::from_secs(1), stream.write_all(answer.as_bytes())).await;
    let _ = stream.shutdown().await;
}
