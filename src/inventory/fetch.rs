//! Texts of inventories: files, commands and HTTP endpoints, bounded in time and size.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use reqwest::{Client, Url};

use super::{InventoryError, MAX_BYTES, blocking};
use crate::error_chain::chain;
use crate::http::{ClientConfig, ClientError, describe, redirect};
use crate::subprocess::{self, SubprocessLimits};

/// A file. A FIFO or a device is not opened.
pub async fn file(path: PathBuf) -> Result<String, InventoryError> {
    blocking(move || {
        let failed = |source| InventoryError::File { file: path.clone(), source };
        let file = open(&path).map_err(failed)?;
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(InventoryError::NotAFile { file: path.clone() });
        }
        let mut bytes = Vec::new();
        file.take(MAX_BYTES as u64 + 1).read_to_end(&mut bytes).map_err(failed)?;
        text(bytes)
    })
    .await
}

fn open(path: &Path) -> std::io::Result<File> {
    let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    OpenOptions::new().read(true).custom_flags(flags).open(path)
}

/// The output of a command. Its process group is killed at its end, at the time limit and at the size limit.
pub async fn command(argv: Vec<String>, timeout: Duration) -> Result<String, InventoryError> {
    let limits = SubprocessLimits { timeout, max_output: MAX_BYTES };
    text(subprocess::run(argv, Vec::new(), limits).await?)
}

fn text(bytes: Vec<u8>) -> Result<String, InventoryError> {
    if bytes.len() > MAX_BYTES {
        return Err(InventoryError::TooLarge);
    }
    String::from_utf8(bytes).map_err(|error| InventoryError::NotText { at: error.utf8_error().valid_up_to() })
}

/// An HTTP endpoint that returns hosts.
pub struct HttpInventory {
    client: Client,
    url: Url,
}

impl HttpInventory {
    pub fn new(url: &str, config: &ClientConfig) -> Result<HttpInventory, ClientError> {
        let parsed = url.parse::<Url>().map_err(|_| ClientError::InvalidUrl)?;
        Ok(HttpInventory { client: config.client(url)?, url: parsed })
    }

    /// The part of the URL that may be logged: its path may contain a secret.
    pub fn shown(&self) -> String {
        format!("{}://{}/…", self.url.scheme(), self.url.host_str().unwrap_or_default())
    }

    /// The body of a successful response.
    pub async fn get(&self, timeout: Duration) -> Result<String, InventoryError> {
        let failed = |error: reqwest::Error| InventoryError::Http(describe(&error.without_url()));
        let request = self.client.get(self.url.clone()).timeout(timeout);
        let mut response = request.send().await.map_err(failed)?;
        if let Some(why) = redirect(&response) {
            return Err(InventoryError::Http(why));
        }
        if !response.status().is_success() {
            return Err(InventoryError::Http(format!("HTTP {}", response.status())));
        }
        let mut bytes = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(failed)? {
            bytes.extend_from_slice(&chunk);
            if bytes.len() > MAX_BYTES {
                return Err(InventoryError::TooLarge);
            }
        }
        text(bytes)
    }
}

impl From<ClientError> for InventoryError {
    fn from(error: ClientError) -> InventoryError {
        InventoryError::Http(chain(&error))
    }
}
