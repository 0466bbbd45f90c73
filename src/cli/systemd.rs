//! systemd notifications (sd_notify): readiness, status line and watchdog. Without NOTIFY_SOCKET they do nothing.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tracing::warn;

use super::output::print::count;
use crate::control::status::{Role, StatusBoard, SyncStatus};

pub struct Systemd {
    to: Option<(UnixDatagram, SocketAddr)>,
    /// Watchdog timeout.
    watchdog: Option<Duration>,
}

impl Systemd {
    pub fn from_env() -> Systemd {
        let to = std::env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty()).and_then(|name| {
            // `@` marks an abstract socket.
            let address = match name.as_bytes() {
                [b'@', rest @ ..] => SocketAddr::from_abstract_name(rest),
                _ => SocketAddr::from_pathname(Path::new(&name)),
            };
            Some((UnixDatagram::unbound().ok()?, address.ok()?))
        });
        let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
        // WATCHDOG_PID of another process: an inherited variable.
        let ours = number("WATCHDOG_PID").is_none_or(|pid| pid == u64::from(std::process::id()));
        let watchdog =
            number("WATCHDOG_USEC").filter(|micros| ours && *micros > 0).map(Duration::from_micros);
        Systemd { to, watchdog }
    }

    pub fn notify(&self, text: &str) {
        let Some((socket, address)) = &self.to else { return };
        // A full queue must not block the controller.
        let sent = socket.set_nonblocking(true).and_then(|()| socket.send_to_addr(text.as_bytes(), address));
        if let Err(error) = sent {
            warn!(%error, "cannot notify systemd");
        }
    }

    pub fn ready(&self) {
        self.notify("READY=1");
    }

    pub fn stopping(&self) {
        self.notify("STOPPING=1");
    }

    /// Sends the status line, and the watchdog keep-alive while the control loop is alive.
    pub async fn run_watchdog(self: Arc<Self>, board: Arc<StatusBoard>) {
        const STATUS: Duration = Duration::from_secs(5);
        if self.to.is_none() {
            return;
        }
        let every = self.watchdog.map_or(STATUS, |most| (most / 2).min(STATUS));
        let mut last_status = String::new();
        loop {
            if self.watchdog.is_some() && board.is_alive() {
                self.notify("WATCHDOG=1");
            }
            let status = status(&board);
            if status != last_status {
                self.notify(&format!("STATUS={status}"));
                last_status = status;
            }
            tokio::time::sleep(every).await;
        }
    }
}

/// The controller's status on one line.
fn status(board: &StatusBoard) -> String {
    let known = board.status();
    if let Some(trouble) = &known.trouble {
        return format!("error: {}", trouble.lines().next().unwrap_or_default());
    }
    let role = match &known.role {
        Role::Starting => return "starting".to_owned(),
        Role::Waiting { host, pid } => return format!("standby: {host} (pid {pid}) leads"),
        Role::Leading { .. } => "leading",
    };
    let settled = known.rows().iter().filter(|row| row.sync == SyncStatus::InSync).count();
    format!("{role}: {settled} of {} in sync", count(known.rows().len(), "instance"))
}
