//! Connection service: attaches the connection to every request, and tracks a request until its response is sent.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::Router;
use axum::body::{Body, Bytes};
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use hyper::service::Service;
use hyper::{Request, Response};
use hyper_util::service::TowerToHyperService;

use super::connections::{Connection, RequestGuard};
use super::server::{Peer, TransportSecurity};

pub struct ConnectionService {
    router: TowerToHyperService<Router>,
    connection: Connection,
    security: TransportSecurity,
}

impl ConnectionService {
    pub fn new(router: Router, connection: Connection, security: TransportSecurity) -> ConnectionService {
        ConnectionService { router: TowerToHyperService::new(router), connection, security }
    }
}

impl Service<Request<Incoming>> for ConnectionService {
    type Response = Response<TrackedBody>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        let in_flight = self.connection.begin_request();
        request.extensions_mut().insert(Peer(self.connection.peer()));
        request.extensions_mut().insert(self.connection.clone());
        request.extensions_mut().insert(self.security.clone());
        let answer = self.router.call(request);
        Box::pin(async move {
            let response = answer.await?;
            Ok(response.map(|body| TrackedBody { body, _in_flight: in_flight }))
        })
    }
}

/// A response body that keeps its request in flight until it is dropped.
pub struct TrackedBody {
    body: Body,
    _in_flight: RequestGuard,
}

impl HttpBody for TrackedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
