//! Shared HTTP layer: listeners with TLS, limits per peer, clients, and files that reload on change.
//!
//! A listener ([`serve`]) limits unauthenticated [`connections`] per peer. [`admission`] grants requests permits and
//! memory from separate budgets for known and unknown callers, and [`budget`] shares them by credential. [`failed_logins`]
//! delays wrong credentials, and [`overload`] reports the exhausted resource.

mod admission;
mod api_client;
mod budget;
mod client;
mod connections;
mod credential_key;
mod error;
mod failed_logins;
mod overload;
mod peers;
mod reload;
mod secret;
mod server;
mod service;
mod tls;
mod trusted_proxy;
mod webhook;
mod write_timeout;

pub use admission::{
    AdmittedRequest, BodyError, UnknownCallers, admit_known, admit_limited, read_body, readmit,
};
pub use api_client::{ApiClient, ApiCredentials, ApiEndpoint, CallError, LineStream};
pub use budget::{Budget, CredentialLimits};
pub use client::{AddressError, ClientConfig, ClientError, redirect};
pub use connections::{Connection, Connections, CredentialCheck};
pub use credential_key::{CredentialKey, CredentialScope, ShareExceeded};
pub use error::{TransportError, UnreadableResponse, describe};
pub use failed_logins::LoginFailureAction;
pub use overload::LimitedResource;
pub use reload::{Reloadable, Revocation, end_on_revocation, watch_file};
pub use secret::{base64, constant_time_eq, is_weak, verify_hex_signature, verify_hmac};
pub use server::{Listener, Peer, TransportSecurity, bind, raise_file_limit, serve};
pub use tls::{Tls, TlsError};
pub use trusted_proxy::{AddressRange, AddressRangeError, AmbiguousUser, TrustedProxy};
pub use webhook::{PostError, WebhookAnswer, WebhookClient};
