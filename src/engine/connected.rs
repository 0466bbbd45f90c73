//! A connected target: a backend with the state store of its leases, journal and history.

use std::path::Path;

use crate::backend::{Abide, AnyBackend};
use crate::error_chain::chain;
use crate::http::{ApiCredentials, ApiEndpoint, ClientConfig, ClientError};
use crate::observe::Target;
use crate::store::{AnyStore, Remote};

/// A target with its backend and state store.
pub struct ConnectedTarget {
    pub name: String,
    pub backend: AnyBackend,
    pub state: AnyStore,
    /// The config file that defines it.
    pub defined_in: Option<String>,
}

/// Reason why a target cannot be called.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error("the local system is not running")]
    NotRunning,
    /// The address or the credentials cannot be used.
    #[error("target {target}: {}", chain(source))]
    Unusable { target: String, source: ClientError },
}

/// The app that local clients call as.
pub const LOCAL_APP: &str = "abide";

/// Address and credentials of the local system in this folder (`$ABIDE_HOME`). `None`: it is not running, or was never
/// started.
pub fn local_endpoint(folder: &Path) -> Option<ApiEndpoint> {
    let read = |name: &str| {
        let text = std::fs::read_to_string(folder.join(name)).ok()?;
        Some(text.trim().to_owned()).filter(|text| !text.is_empty())
    };
    Some(ApiEndpoint {
        url: read("address")?,
        credentials: ApiCredentials::App {
            code: LOCAL_APP.to_owned(),
            secret: read("secret")?,
            username: std::env::var("USER").ok(),
        },
        client_config: ClientConfig::default(),
    })
}

impl ConnectedTarget {
    /// The running local system of this folder (`$ABIDE_HOME`).
    pub fn local(folder: &Path) -> Result<ConnectedTarget, ConnectError> {
        let access = local_endpoint(folder).ok_or(ConnectError::NotRunning)?;
        ConnectedTarget::gateway("local", &access)
    }

    /// An Abide gateway, which stores its own state. No call is made yet.
    pub fn gateway(name: &str, access: &ApiEndpoint) -> Result<ConnectedTarget, ConnectError> {
        let unusable = |source| ConnectError::Unusable { target: name.to_owned(), source };
        let abide = Abide::new(access).map_err(unusable)?;
        let state = AnyStore::own(Remote::new(abide.calls().clone()));
        let (name, backend) = (name.to_owned(), AnyBackend::Abide(Box::new(abide)));
        Ok(ConnectedTarget { name, backend, state, defined_in: None })
    }
}

impl Target for ConnectedTarget {
    type Backend = AnyBackend;
    type State = AnyStore;

    fn backend(&self) -> &AnyBackend {
        &self.backend
    }

    fn state(&self) -> &AnyStore {
        &self.state
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn set_generation(&self, generation: u64) {
        // A gateway checks generations of the leases that it stores.
        if self.state.is_own() {
            self.backend.act_as(generation);
        }
    }

    fn discard_prefetched(&self) {
        if let AnyBackend::Abide(abide) = &self.backend {
            abide.discard_prefetched();
        }
    }
}
