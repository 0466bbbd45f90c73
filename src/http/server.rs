//! Serving: connections are limited in number, and each has a time for its handshake, for every header, and for its peer
//! to read what it is sent.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio_rustls::TlsAcceptor;
use tracing::{debug, warn};

use super::patient::Patient;
use super::tls::Tls;

/// The other end of a connection: every request carries it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer(pub SocketAddr);

/// Where and how to listen.
pub struct Listener {
    pub socket: TcpListener,
    pub tls: Option<Tls>,
    /// Connections at once; more are turned away.
    pub connections: usize,
    /// For a handshake, and for each request's header.
    pub header_time: Duration,
}

/// The largest header.
const HEADER_BYTES: usize = 64 << 10;
/// How long what was sent may stay unread.
const UNREAD: Duration = Duration::from_secs(60);
/// How long open requests may take to end when we are told to.
const FAREWELL: Duration = Duration::from_secs(5);

/// Serves until `stop` says so; then finishes what is under way.
pub async fn serve(listener: Listener, router: Router, mut stop: watch::Receiver<bool>) {
    let Listener { socket, tls, connections, header_time } = listener;
    let room = Arc::new(Semaphore::new(connections));
    loop {
        let accepted = tokio::select! {
            accepted = socket.accept() => accepted,
            () = told(&mut stop) => break,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of descriptors, mostly: others will be closed.
                warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let Ok(permit) = Arc::clone(&room).try_acquire_owned() else {
            tokio::spawn(turn_away(stream));
            continue;
        };
        let (router, stop, acceptor) =
            (router.clone(), stop.clone(), tls.as_ref().map(|tls| TlsAcceptor::from(tls.config())));
        tokio::spawn(async move {
            let _ = stream.set_nodelay(true);
            match acceptor {
                None => connection(stream, peer, router, header_time, stop, permit).await,
                Some(acceptor) => match tokio::time::timeout(header_time, acceptor.accept(stream)).await {
                    Ok(Ok(stream)) => connection(stream, peer, router, header_time, stop, permit).await,
                    Ok(Err(error)) => debug!(%peer, %error, "no TLS connection"),
                    Err(_) => debug!(%peer, "the TLS handshake took too long"),
                },
            }
        });
    }
    // Whoever is done gives its place back.
    let places = u32::try_from(connections).unwrap_or(u32::MAX);
    let _ = tokio::time::timeout(FAREWELL, room.acquire_many(places)).await;
}

async fn connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    peer: SocketAddr,
    router: Router,
    header_time: Duration,
    mut stop: watch::Receiver<bool>,
    _permit: OwnedSemaphorePermit,
) {
    let router = router.layer(axum::Extension(Peer(peer)));
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(header_time).max_buf_size(HEADER_BYTES);
    let serving =
        http.serve_connection(TokioIo::new(Patient::new(stream, UNREAD)), TowerToHyperService::new(router));
    tokio::pin!(serving);
    let ended = tokio::select! {
        ended = serving.as_mut() => ended,
        () = told(&mut stop) => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
    };
    if let Err(error) = ended {
        debug!(%peer, %error, "a connection ended badly");
    }
}

/// Waits until we are told to stop; who would tell may be gone, which says the same.
async fn told(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}

/// Too many are here: said in as few bytes as it takes.
async fn turn_away(mut stream: TcpStream) {
    let body = r#"{"result":false,"code":1642903,"message":"too many connections","data":null}"#;
    let answer = format!(
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let _ = tokio::time::timeout(Duration::from_secs(1), stream.write_all(answer.as_bytes())).await;
    let _ = stream.shutdown().await;
}
