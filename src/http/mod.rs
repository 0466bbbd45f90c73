//! The one set-up of HTTP: how we listen, with TLS or without, what a slow or greedy peer meets, and files that are read
//! again when they change.

mod calls;
mod client;
mod hook;
mod patient;
mod reload;
mod secret;
mod server;
mod tls;
mod told;

pub use calls::{Access, Broken, Calls, Lines};
pub use client::{AddressError, Calling, redirect};
pub use hook::Hook;
pub use reload::{Reloaded, follow};
pub use secret::{base64, is_signed, same, signs};
pub use server::{Listener, Peer, serve};
pub use tls::Tls;
pub use told::told_of;
