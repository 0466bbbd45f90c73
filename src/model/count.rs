//! Counts in texts: `1 file`, `2 files`.

use std::fmt::Display;

/// "1 process", "2 processes"; the noun may follow other words, as in "log line".
pub fn count<N: Display + PartialEq + From<u8>>(n: N, noun: &str) -> String {
    let noun = noun_for(&n, noun);
    format!("{n} {noun}")
}

/// The form of a noun after this number.
pub fn noun_for<N: PartialEq + From<u8>>(n: &N, noun: &str) -> String {
    match noun.strip_suffix('y') {
        _ if *n == N::from(1) => noun.to_owned(),
        Some(stem) if stem.ends_with(|c: char| !"aeiou".contains(c)) => format!("{stem}ies"),
        _ if noun.ends_with('s') => format!("{noun}es"),
        _ => format!("{noun}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nouns_follow_their_number() {
        assert_eq!(count(1_usize, "file"), "1 file");
        assert_eq!(count(0_u64, "file"), "0 files");
        assert_eq!(count(2_usize, "process"), "2 processes");
        assert_eq!(count(1_u32, "entry"), "1 entry");
        assert_eq!(count(2_u64, "entry"), "2 entries");
        assert_eq!(count(2_usize, "key"), "2 keys");
    }
}
