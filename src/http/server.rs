//! Serving: connections are limited in number and by peer, and each has a time for its handshake, for every header, and
//! for its peer to read what it is sent.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::process::{Resource as Limited, Rlimit, getrlimit, setrlimit};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_rustls::TlsAcceptor;
use tracing::{debug, warn};

use super::connections::{Connection, Connections};
use super::service::ConnectionService;
use super::tls::Tls;
use super::write_timeout::WriteTimeout;

/// The other end of a connection: every request carries it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer(pub SocketAddr);

/// Where and how to listen.
pub struct Listener {
    pub socket: TcpListener,
    pub tls: Option<Tls>,
    /// Connections at once. Unauthenticated ones make room for new ones; more known callers than this are refused.
    pub connections: usize,
    /// For each request's header, and for a connection between two requests.
    pub header_time: Duration,
}

/// The largest header.
const HEADER_BYTES: usize = 64 << 10;
/// How long a new connection may take for its handshake, and for its first header.
const FIRST_HEADER_TIMEOUT: Duration = Duration::from_secs(5);
/// How long what was sent may stay unread.
const WRITE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long open requests may take to end when we are told to.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);
/// Connections that wait to be accepted; the kernel bounds it by net.core.somaxconn.
const BACKLOG: u32 = 4096;
/// Refusals that are written at once; beyond it a connection is closed without one.
const MAX_REJECTIONS: usize = 64;
/// Failures to accept are logged this often.
const LOG_INTERVAL: Duration = Duration::from_secs(5);

/// Listens with a backlog that holds a burst of connections.
pub fn bind(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // The port of a listener that has just ended is free.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Raises the soft limit of open files to the hard one: each connection needs one. Not for a process that starts others
/// which inherit it.
pub fn raise_file_limit() {
    let limit = getrlimit(Limited::Nofile);
    if limit.current != limit.maximum
        && let Err(error) = setrlimit(Limited::Nofile, Rlimit { current: limit.maximum, ..limit })
    {
        debug!(%error, "the limit of open files stays as it is");
    }
}

/// Connections that leave a quarter of the open files for everything else.
fn within_file_limit(connections: usize) -> usize {
    let files = getrlimit(Limited::Nofile).current.and_then(|limit| usize::try_from(limit).ok());
    files.map_or(connections, |files| connections.min(files - files / 4)).max(1)
}

/// Serves until `stop` says so; then finishes what is in flight.
pub async fn serve(listener: Listener, router: Router, mut stop: watch::Receiver<bool>) {
    let Listener { socket, tls, connections, header_time } = listener;
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
                // Out of descriptors, mostly: a silent connection gives its own.
                connections.evict_one();
                tokio::time::sleep(Duration::from_millis(10)).await;
                continue;
            }
        };
        let Some(connection) = connections.admit(peer) else {
            if let Ok(permit) = Arc::clone(&refusals).try_acquire_owned() {
                tokio::spawn(async move {
                    reject_overloaded(stream).await;
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
                () = connection.evicted() => debug!(%peer, "an unauthenticated connection made room for another"),
            }
            drop(alive);
        });
    }
    drop(alive);
    let _ = tokio::time::timeout(SHUTDOWN_TIMEOUT, all_ended.recv()).await;
}

/// What a connection is served with.
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
        let Some(acceptor) = acceptor else { return self.serve(stream, connection).await };
        match tokio::time::timeout(self.first_header_timeout(), acceptor.accept(stream)).await {
            Ok(Ok(stream)) => self.serve(stream, connection).await,
            Ok(Err(error)) => debug!(%peer, %error, "no TLS connection"),
            Err(_) => debug!(%peer, "the TLS handshake took too long"),
        }
    }

    async fn serve(
        mut self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        connection: &Connection,
    ) {
        let peer = connection.peer();
        let first = tokio::time::sleep(self.first_header_timeout());
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(self.header_time).max_buf_size(HEADER_BYTES);
        let service = ConnectionService::new(self.router, connection.clone());
        let serving = http.serve_connection(TokioIo::new(WriteTimeout::new(stream, WRITE_TIMEOUT)), service);
        tokio::pin!(serving, first);
        let mut is_first = true;
        let ended = loop {
            tokio::select! {
                ended = serving.as_mut() => break ended,
                () = first.as_mut(), if is_first => {
                    is_first = false;
                    if !connection.has_begun() {
                        debug!(%peer, "no request came");
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
            debug!(%peer, %error, "a connection ended badly");
        }
    }
}

/// Waits until we are told to stop; who would tell may be gone, which says the same.
async fn stop_requested(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}

/// Too many are here: said in as few bytes as it takes.
async fn reject_overloaded(mut stream: TcpStream) {
    let body = r#"{"result":false,"code":1642903,"message":"too many connections","data":null}"#;
    let answer = format!(
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let _ = tokio::time::timeout(Duration::from_secs(1), stream.write_all(answer.as_bytes())).await;
    let _ = stream.shutdown().await;
}
