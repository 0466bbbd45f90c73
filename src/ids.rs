//! Generated ids and secrets: one function per kind.

use std::sync::atomic::{AtomicU64, Ordering};

use ring::rand::{SecureRandom, SystemRandom};

use crate::model::Time;

/// An id that no other user can guess: 128 random bits from the kernel, in hex.
pub fn fresh_id() -> String {
    random_hex::<16>()
}

/// A secret of 192 random bits, in hex.
pub fn fresh_secret() -> String {
    random_hex::<24>()
}

/// A key of 256 random bits, in hex.
pub fn fresh_key() -> String {
    random_hex::<32>()
}

/// An id of a request, for logs. Not a secret.
pub fn request_id() -> String {
    format!("{:016x}", fastrand::u64(..))
}

/// An id that sorts by time and is unique on this host: two may start in the same millisecond.
pub fn ordered_id(at: Time) -> String {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let nth = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("{:013}-{}-{nth}", at.0, std::process::id())
}

/// The id of a lease holder: its role, process and start time.
pub fn holder_id(role: &str, at: Time) -> String {
    format!("{role}-{}-{}", std::process::id(), at.0)
}

fn random_hex<const BYTES: usize>() -> String {
    let mut bytes = [0; BYTES];
    if SystemRandom::new().fill(&mut bytes).is_err() {
        // An id or a secret that can be guessed proves nothing.
        tracing::error!("cannot read random bytes from the kernel: the process cannot continue");
        std::process::abort();
    }
    hex::encode(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_have_a_fixed_form_and_differ() {
        assert_eq!([fresh_id().len(), fresh_secret().len(), request_id().len()], [32, 48, 16]);
        assert_ne!(fresh_id(), fresh_id());
        let (one, other) = (ordered_id(Time(7)), ordered_id(Time(7)));
        assert!(one.starts_with("0000000000007-") && one != other);
    }
}
