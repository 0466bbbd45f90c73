//! Git servers that send without end: messages and packs are limited, and nothing of a refused fetch stays on disk.

use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use crate::apply::Machine;
use crate::fixtures::machine::start_logged;
use crate::http::Request;
use crate::support::until;

const COMMIT: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";

/// What the server sends after the negotiation.
#[derive(Clone, Copy)]
enum Flood {
    Messages,
    Pack,
}

fn packet(bytes: &[u8]) -> Vec<u8> {
    [format!("{:04x}", bytes.len() + 4).as_bytes(), bytes].concat()
}

fn serve(flood: Flood) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            stream.set_read_timeout(Some(Duration::from_secs(5))).expect("a timeout");
            let Some(request) = Request::read(&mut stream) else { continue };
            // Ends when git does.
            let _ = match request.head.starts_with("GET") {
                true => advertise(&mut stream),
                false => send_without_end(&mut stream, flood, &request),
            };
        }
    });
    address
}

fn head(stream: &mut TcpStream, kind: &str) -> std::io::Result<()> {
    write!(stream, "HTTP/1.0 200 OK\r\nContent-Type: application/x-git-upload-pack-{kind}\r\n\r\n")
}

fn advertise(stream: &mut TcpStream) -> std::io::Result<()> {
    let abilities = "multi_ack_detailed side-band-64k ofs-delta shallow allow-tip-sha1-in-want no-progress \
                     agent=git/2.39 symref=HEAD:refs/heads/main";
    head(stream, "advertisement")?;
    let lines = [
        packet(b"# service=git-upload-pack\n"),
        b"0000".to_vec(),
        packet(format!("{COMMIT} HEAD\0{abilities}\n").as_bytes()),
        packet(format!("{COMMIT} refs/heads/main\n").as_bytes()),
        b"0000".to_vec(),
    ];
    stream.write_all(&lines.concat())
}

fn send_without_end(stream: &mut TcpStream, flood: Flood, request: &Request) -> std::io::Result<()> {
    head(stream, "result")?;
    let is_shallow = request.body.windows(6).any(|bytes| bytes == b"deepen");
    if is_shallow {
        stream.write_all(b"0000")?;
    }
    stream.write_all(&packet(b"NAK\n"))?;
    let block = match flood {
        Flood::Messages => packet(&[b"\x02".as_slice(), &[b'A'; 60_000], b"\n"].concat()),
        Flood::Pack => {
            // One object of 64 GB, stored without compression.
            let mut start = b"\x01PACK\0\0\0\x02\0\0\x10\0".to_vec();
            let (mut size, mut byte) = ((64_u64 << 30) >> 4, 3 << 4);
            while size > 0 {
                start.push(byte | 0x80);
                (byte, size) = ((size & 0x7f) as u8, size >> 7);
            }
            start.extend([byte, 0x78, 0x01]);
            stream.write_all(&packet(&start))?;
            let stored = [b"\x00\xff\xff\x00\x00".as_slice(), &[b'A'; 65_535]].concat();
            stored.chunks(32_770).flat_map(|part| packet(&[b"\x01", part].concat())).collect()
        }
    };
    loop {
        stream.write_all(&block)?;
    }
}

fn watch_ends_fetch(flood: Flood, message: &str) -> Machine {
    let machine = Machine::new();
    let url = format!("http://{}/r.git", serve(flood));
    let args = ["watch", "--git", &url, "--git-max-size", "20MB", "--listen", "127.0.0.1:0"];
    let mut command = machine.command(&args);
    command.env("HOME", machine.path(".")).env("GIT_CONFIG_NOSYSTEM", "1");
    let _watch = start_logged(&mut command, &machine.path("watch.log"));
    let log = || std::fs::read_to_string(machine.path("watch.log")).unwrap_or_default();
    until("the fetch was ended", || log().contains(message));
    machine
}

#[test]
fn messages_of_a_server_are_limited() {
    watch_ends_fetch(Flood::Messages, "printed more than 1048576 bytes of messages");
}

#[test]
fn a_pack_is_limited_and_its_rest_is_removed() {
    let machine = watch_ends_fetch(Flood::Pack, "sent a pack of more than 20000000 bytes (--git-max-size)");
    let mirrors = std::fs::read_dir(machine.path(".abide-home/git")).expect("mirrors").flatten();
    let packs = mirrors.filter_map(|mirror| std::fs::read_dir(mirror.path().join("objects/pack")).ok());
    let files: Vec<_> = packs.flatten().flatten().map(|file| file.file_name()).collect();
    assert!(files.is_empty(), "{files:?}");
}
