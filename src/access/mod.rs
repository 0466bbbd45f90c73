//! Access: callers of a gateway or a controller, and their grants.
//!
//! A caller is an app ([`apps`]) or a person ([`people`]). Both have a [`Grant`], and [`authorize`] is the only
//! function that decides. The gateway and the status server of a controller authenticate callers and name what a
//! request concerns.

pub mod apps;
mod error;
mod grant;
mod limits;
mod people;

pub(crate) use error::read_list;
pub use error::{CredentialsError, CredentialsFileError};
pub use grant::{
    AccessRequest, AccessRole, Grant, GrantPart, MissingGrant, Principal, UnknownRole, authorize,
};
pub use limits::{AppLimits, NamespaceLimitTable, NamespaceLimits};
pub use people::{MIN_TOKEN_CHARS, token_digest};
