//! A proxy between an agent and its gateway that cuts and holds back single messages.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::http::Request;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the agent to the gateway.
    Up,
    Down,
}

/// One message: a request, a response, or a piece of a stream.
pub struct Message<'a> {
    pub direction: Direction,
    /// `join`, `stream` or `tell`.
    pub call: &'a str,
    /// The body of the request, also of its response.
    pub request: &'a str,
}

impl Message<'_> {
    pub fn is_result(&self) -> bool {
        self.call == "tell" && self.request.contains("\"result\"")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Pass,
    /// The connection ends in place of the message.
    Cut,
}

/// What becomes of a message. It may wait: each connection has a thread of its own.
pub type Rule = Arc<dyn Fn(&Message<'_>) -> Fate + Send + Sync>;

/// It ends with the test.
pub struct Proxy {
    pub address: SocketAddr,
    over: Arc<AtomicBool>,
}

impl Proxy {
    pub fn to(upstream: SocketAddr, rule: Rule) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let over = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&over);
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if ends.load(Ordering::Acquire) {
                    return;
                }
                let rule = Arc::clone(&rule);
                std::thread::spawn(move || relay(client, upstream, &rule));
            }
        });
        Proxy { address, over }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        let _ = TcpStream::connect(self.address);
    }
}

/// One connection of the agent's, until it ends or is cut.
fn relay(mut client: TcpStream, upstream: SocketAddr, rule: &Rule) -> Option<()> {
    loop {
        let request = Request::read(&mut client)?;
        let call = request.path.rsplit('/').next()?.split('?').next()?.to_owned();
        let body = String::from_utf8_lossy(&request.body).into_owned();
        let fate = |direction| rule(&Message { direction, call: &call, request: &body });
        if fate(Direction::Up) == Fate::Cut {
            return None;
        }
        let mut gateway = TcpStream::connect(upstream).ok()?;
        gateway.write_all(request.head.as_bytes()).ok()?;
        gateway.write_all(&request.body).ok()?;
        if call == "stream" {
            return relay_stream(&mut client, &mut gateway, &fate);
        }
        let response = Request::read(&mut gateway)?;
        if fate(Direction::Down) == Fate::Cut {
            return None;
        }
        client.write_all(response.head.as_bytes()).ok()?;
        client.write_all(&response.body).ok()?;
    }
}

/// The head passes: the agent reports results as soon as the stream is open.
fn relay_stream(
    client: &mut TcpStream,
    gateway: &mut TcpStream,
    fate: &dyn Fn(Direction) -> Fate,
) -> Option<()> {
    let head = Request::read(gateway)?;
    client.write_all(head.head.as_bytes()).ok()?;
    let mut piece = head.body;
    let mut part = [0; 65_536];
    loop {
        if !piece.is_empty() && fate(Direction::Down) == Fate::Cut {
            return None;
        }
        client.write_all(&piece).ok()?;
        let length = gateway.read(&mut part).ok()?;
        if length == 0 {
            return None;
        }
        piece = part[..length].to_vec();
    }
}
