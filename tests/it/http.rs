//! HTTP in a few lines that share nothing with ours.

use std::io::Read;

use serde_json::Value;

/// Results of a live status check of `web/api` on 10.0.0.1, as a platform sends them: neither running nor supervised.
pub const NOTHING_RUNS: &str = r#"{"0:10.0.0.1:web:api": {"error_code": 0, "error_msg": "success",
    "content": "{\"ip\": \"10.0.0.1\", \"utctime\": \"2026-11-18T10:00:00Z\", \"timezone\": 0, \"process\": []}"}}"#;

/// A request as it came.
pub struct Request {
    pub path: String,
    /// With the empty line that ends it.
    pub head: String,
    pub body: Vec<u8>,
}

impl Request {
    /// The next one of a connection, whole; `None`: there is none, or only a part came.
    pub fn read(stream: &mut impl Read) -> Option<Request> {
        let mut bytes = Vec::new();
        let mut part = [0; 8192];
        let mut more = |bytes: &mut Vec<u8>| match stream.read(&mut part).ok()? {
            0 => None,
            n => {
                bytes.extend(&part[..n]);
                Some(())
            }
        };
        let end = loop {
            if let Some(at) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
                break at + 4;
            }
            more(&mut bytes)?;
        };
        let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
        let lower = head.to_ascii_lowercase();
        let length = lower.lines().find_map(|line| line.strip_prefix("content-length:"));
        let length: usize = length.and_then(|text| text.trim().parse().ok()).unwrap_or(0);
        while bytes.len() < end + length {
            more(&mut bytes)?;
        }
        Some(Request { path: head.split(' ').nth(1)?.to_owned(), head, body: bytes.split_off(end) })
    }
}

/// An answer as it came. Status 0: it was none.
pub struct Answer {
    pub status: u16,
    /// In lower case.
    pub head: String,
    pub body: String,
}

impl Answer {
    /// All that comes until the connection ends, or nothing more comes.
    pub fn read(stream: &mut impl Read) -> Answer {
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8_lossy(&answer).into_owned();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
        let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
        Answer { status, head: head.to_lowercase(), body: body.to_owned() }
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }
}
