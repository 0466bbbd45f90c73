//! Notifications to systemd: ready, status, watchdog and stopping.

use std::os::unix::net::UnixDatagram;
use std::process::Stdio;
use std::time::Duration;

use crate::apply::{KillOnDrop, Machine};
use crate::controller_api::{address, get};
use crate::support::until;
use crate::system::kill;
use crate::watch::running;

#[test]
fn systemd_is_notified_of_ready_watchdog_and_stopping() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let path = machine.path("notify.sock");
    let socket = UnixDatagram::bind(&path).expect("a socket");
    socket.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
    let out = std::fs::File::create(machine.path("watch.log")).expect("a file");
    let mut child = KillOnDrop(
        machine
            .command(&["watch", "m", "--listen", "127.0.0.1:0", "--interval", "1s"])
            .env("NOTIFY_SOCKET", &path)
            .env("WATCHDOG_USEC", "400000")
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(Stdio::null())
            .spawn()
            .expect("it starts"),
    );
    let hear = |what: &str| {
        let mut bytes = [0; 4096];
        loop {
            let read = socket.recv(&mut bytes).unwrap_or_else(|error| panic!("{what}: {error}"));
            let text = String::from_utf8_lossy(&bytes[..read]).into_owned();
            if text.contains(what) {
                return text;
            }
        }
    };
    hear("READY=1");
    // The notification was sent after the listener answers.
    let at = address(&machine, "watch.log");
    assert_eq!(get(at, "/healthz").status, 200);
    hear("STATUS=leading: 1 of 1 instance in sync");
    hear("WATCHDOG=1");
    hear("WATCHDOG=1");
    // A restart does not end the stream of events.
    kill(child.0.id(), "HUP");
    until("it leads again", || {
        let events = get(at, "/api/v1/status").json()["events"].clone();
        events.as_array().is_some_and(|all| all.iter().filter(|one| one["kind"] == "leading").count() == 2)
    });
    machine.process("b", "1", "");
    until("b runs", || running(&machine, &["b"]));
    kill(child.0.id(), "TERM");
    hear("STOPPING=1");
    assert_eq!(child.0.wait().expect("it ends").code(), Some(143));
}
