//! Access of an app or a person, as the gateway reports it to the caller.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Access of the calling app or person. Lists have patterns; `*` matches any characters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AccessInfo {
    /// The app's code, or `person:NAME`.
    pub app: String,
    /// The name in the users file; absent: the caller is an app.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub person: Option<String>,
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

/// `abide access hash -o json`.
#[derive(Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct TokenHash {
    /// Only of a generated token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
    /// SHA-256 in hex, for the users file.
    pub token_sha256: String,
}

/// Answer of `GET /api/v1/session` of the controller: the caller, and the session of a browser.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SessionInfo {
    #[serde(flatten)]
    pub access: AccessInfo,
    /// Sent in the header `X-Abide-Csrf` of each change in a browser session; `null`: the caller has no session.
    pub csrf: Option<String>,
    /// The time at which the session ends at the latest.
    pub session_ends: Option<String>,
}

impl SessionInfo {
    /// The holder of the listener's token.
    pub fn of_token() -> SessionInfo {
        let all = || vec!["*".to_owned()];
        let access = AccessInfo {
            app: "token".to_owned(),
            person: None,
            role: "admin".to_owned(),
            namespaces: all(),
            hosts: all(),
            users: None,
            owners: None,
            expires: None,
        };
        SessionInfo { access, csrf: None, session_ends: None }
    }
}
