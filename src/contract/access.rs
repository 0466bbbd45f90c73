//! Access of an app, as the gateway reports it to the app.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What the calling app may do. Lists have patterns; `*` matches any characters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AccessInfo {
    pub app: String,
    /// `read`, `operate` or `admin`.
    pub role: String,
    pub namespaces: Vec<String>,
    pub hosts: Vec<String>,
    /// Accounts that a process may run as; `null`: any.
    pub users: Option<Vec<String>>,
    /// `null`: processes of any owner; state of any owner only with every namespace.
    pub owners: Option<Vec<String>>,
    /// End of the secret that this request used; `null`: none.
    pub expires: Option<String>,
}
