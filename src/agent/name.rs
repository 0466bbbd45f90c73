//! Name of an agent, and the host that it serves by default.

use std::path::{Path, PathBuf};

use crate::model::HostKey;

/// The host that an agent serves by default.
pub fn this_host() -> HostKey {
    HostKey::Address { cloud: 0, ip: std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST) }
}

/// Reason why an agent has no name.
#[derive(Debug, thiserror::Error)]
pub enum AgentNameError {
    #[error("cannot generate an agent id")]
    Generate(#[source] std::io::Error),
    #[error("cannot write {}", file.display())]
    Write { file: PathBuf, source: std::io::Error },
}

/// The agent's name: generated once and stored in its folder.
pub fn agent_name(folder: &Path) -> Result<String, AgentNameError> {
    let file = folder.join("agent-id");
    match std::fs::read_to_string(&file) {
        Ok(name) if !name.trim().is_empty() => Ok(name.trim().to_owned()),
        _ => {
            let random = std::fs::read_to_string("/proc/sys/kernel/random/uuid");
            let name = random.map_err(AgentNameError::Generate)?.trim().to_owned();
            match std::fs::write(&file, &name) {
                Ok(()) => Ok(name),
                Err(source) => Err(AgentNameError::Write { file, source }),
            }
        }
    }
}
