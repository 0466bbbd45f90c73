//! The one set-up of HTTP: how we listen, with TLS or without, what a slow or greedy peer meets, and files that are read
//! again when they change.
//!
//! A listener ([`serve`]) has [`connections`], of which the unauthenticated ones are bounded by peer; [`admission`] gives
//! requests their permits and memory, apart for known and unknown callers; [`logins`] slows wrong credentials down, and
//! [`overload`] says for lack of what callers are refused.

mod admission;
mod calls;
mod client;
mod connections;
mod hook;
mod logins;
mod overload;
mod patient;
mod peers;
mod reload;
mod secret;
mod server;
mod service;
mod tls;
mod told;

pub use admission::{Admitted, BodyError, Budget, UnknownCallers, read_body, readmit};
pub use calls::{Access, Broken, Calls, Lines};
pub use client::{AddressError, Calling, redirect};
pub use connections::{Connection, Connections, InForce};
pub use hook::Hook;
pub use logins::Verdict;
pub use overload::Resource;
pub use reload::{Reloaded, Revoked, follow, until_revoked};
pub use secret::{base64, is_short, is_signed, same, signs};
pub use server::{Listener, Peer, bind, raise_file_limit, serve};
pub use tls::Tls;
pub use told::told_of;
