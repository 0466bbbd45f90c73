//! Arguments of people: the users file, and single sign-on by a trusted proxy.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::http::HeaderName;
use tracing::warn;

use super::args::InvalidValue;
use super::{Exit, Failure};
use crate::access::CredentialsFileError;
use crate::access::apps::Apps;
use crate::error_chain::chain;
use crate::http::{AddressRange, Reloadable, TrustedProxy, watch_file};
use crate::permissions::require_private;

#[derive(Debug, Default, clap::Args)]
#[command(next_help_heading = "People")]
pub struct PeopleArgs {
    /// File of users: people with digests of their tokens, roles and scopes
    #[arg(long, env = "ABIDE_USERS", value_name = "FILE")]
    pub users: Option<PathBuf>,
    /// Address range of proxies that authenticate people (repeatable); needs --user-header and --users
    ///
    /// Every program at these addresses can act as any person. List the proxy alone.
    #[arg(
        long,
        env = "ABIDE_TRUSTED_PROXY",
        value_name = "CIDR",
        value_delimiter = ',',
        requires = "user_header"
    )]
    pub trusted_proxy: Vec<AddressRange>,
    /// Header in which a trusted proxy names the person, such as X-Forwarded-User
    #[arg(long, env = "ABIDE_USER_HEADER", value_name = "NAME", value_parser = parse_header, requires_all = ["trusted_proxy", "users"])]
    pub user_header: Option<HeaderName>,
}

fn parse_header(text: &str) -> Result<HeaderName, InvalidValue> {
    const OF_CLIENTS: [&str; 4] = ["authorization", "cookie", "host", "x-abide-csrf"];
    let name = text.parse::<HeaderName>().map_err(|_| InvalidValue("not the name of a header"))?;
    match OF_CLIENTS.contains(&name.as_str()) {
        true => Err(InvalidValue("clients send this header themselves")),
        false => Ok(name),
    }
}

/// Reads the users file of a server. Other users must not be able to read or change it.
pub fn read_users(file: &Path) -> Result<Apps, CredentialsFileError> {
    let people = Apps::read_people(file)?;
    require_private(file)?;
    Ok(people)
}

impl PeopleArgs {
    /// The people of the users file, which is reloaded on change. `None`: there is no users file.
    pub fn people(&self) -> Result<Option<Reloadable<Apps>>, Failure> {
        let Some(file) = self.users.clone() else { return Ok(None) };
        let people = watch_file(vec![file.clone()], move || read_users(&file));
        people.map(Some).map_err(|error| Failure::new(Exit::Failed, format!("--users: {}", chain(&error))))
    }

    pub fn proxy(&self) -> Option<Arc<TrustedProxy>> {
        let header = self.user_header.clone()?;
        if self.trusted_proxy.iter().any(|range| range.has_loopback()) {
            warn!("--trusted-proxy contains loopback: every user of this machine can act as any person");
        }
        Some(Arc::new(TrustedProxy::new(self.trusted_proxy.clone(), header)))
    }
}
