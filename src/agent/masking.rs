//! Masking of secret values in command output: a command that prints its environment discloses no secret.
//!
//! Masked are the values of `secret` variables and of `env.file` entries, as the command received them, and each line of a
//! value with several lines. A value that the command encodes, splits or shortens is not recognized.

use std::collections::BTreeSet;

/// Shorter values are not masked: they occur in ordinary words and numbers, and the mask would confirm them.
const MIN_CHARS: usize = 6;
const MASK: &str = "(secret)";

/// The texts that are masked in the output of one command.
#[derive(Clone, Default)]
pub struct SecretTexts(BTreeSet<String>);

impl SecretTexts {
    pub fn add(&mut self, value: &str) {
        let parts = std::iter::once(value).chain(value.lines()).map(str::trim);
        let long = parts.filter(|part| part.chars().count() >= MIN_CHARS);
        self.0.extend(long.map(str::to_owned));
    }

    /// Length of the longest text in bytes. Output that is cut has to be read from this many bytes before the cut.
    pub fn longest(&self) -> usize {
        self.0.iter().map(String::len).max().unwrap_or(0)
    }

    /// Whole lines of output with secret texts replaced.
    pub fn mask_lines(&self, output: &[u8]) -> String {
        match self.0.is_empty() {
            true => String::from_utf8_lossy(output).into_owned(),
            false => String::from_utf8_lossy(&self.masked(output, 0)).into_owned(),
        }
    }

    /// The output from `start` on, with secret texts replaced, including one that begins before `start`.
    pub fn mask(&self, output: &[u8], start: usize) -> String {
        String::from_utf8_lossy(&self.masked(output, start)).trim().to_owned()
    }

    fn masked(&self, output: &[u8], start: usize) -> Vec<u8> {
        let mut is_secret = vec![false; output.len()];
        for text in self.0.iter().map(String::as_bytes).filter(|text| text.len() <= output.len()) {
            for at in 0..=output.len() - text.len() {
                if output[at] == text[0] && output[at..].starts_with(text) {
                    is_secret[at..at + text.len()].fill(true);
                }
            }
        }
        let mut shown = Vec::with_capacity(output.len() - start.min(output.len()));
        for at in start..output.len() {
            match is_secret[at] {
                false => shown.push(output[at]),
                true if at == start || !is_secret[at - 1] => shown.extend_from_slice(MASK.as_bytes()),
                true => {}
            }
        }
        shown
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(values: &[&str]) -> SecretTexts {
        let mut texts = SecretTexts::default();
        values.iter().for_each(|value| texts.add(value));
        texts
    }

    #[test]
    fn every_occurrence_is_masked_and_short_values_are_not() {
        let secrets = texts(&["hunter2", "short", "", "key one\nkey two\nend\n"]);
        assert_eq!(secrets.mask(b"a=hunter2,hunter22 short\n", 0), "a=(secret),(secret)2 short");
        assert_eq!(secrets.mask(b"x key two y", 0), "x (secret) y", "one line of a multi-line value");
        assert_eq!(secrets.mask(b"key one\nkey two\nend\n", 0), "(secret)");
        assert_eq!(texts(&["abcdefgh", "efghijkl"]).mask(b"-abcdefghijkl-", 0), "-(secret)-", "overlapping");
        assert_eq!(texts(&["aaaaaa"]).mask(b"aaaaaaaaaaab", 0), "(secret)b", "no rest is left");
        assert_eq!(SecretTexts::default().mask(b" plain\xff ", 0), "plain\u{fffd}");
        assert_eq!(secrets.mask(b"", 0), "");
    }

    #[test]
    fn a_secret_across_the_cut_is_masked() {
        let secrets = texts(&["hunter2"]);
        for start in 1..8 {
            assert_eq!(secrets.mask(b"=hunter2 rest", start), "(secret) rest", "{start}");
        }
        assert_eq!(secrets.mask(b"=hunter2 rest", 8), "rest");
        assert_eq!(secrets.longest(), 7);
    }
}
