//! Command lines of other supervisors: splits them into words, and quotes the words for the shell.
//!
//! These supervisors do not run a shell, so `$`, `*` and `;` are literal. A command is split by the rules of its supervisor
//! and joined with shell quotes.

use crate::manifest::variables;

/// Placeholder for the instance number during conversion. Files that contain it are rejected.
pub const INSTANCE: char = '\u{e000}';
/// Start of an environment variable's name, terminated by [`END`].
pub const VARIABLE: char = '\u{e001}';
/// Like [`VARIABLE`], for a variable whose value is split into words.
pub const SPLIT_VARIABLE: char = '\u{e003}';
pub const END: char = '\u{e002}';
pub const MARKS: [char; 4] = [INSTANCE, VARIABLE, END, SPLIT_VARIABLE];

/// Quoting rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuoteStyle {
    /// Python's shlex: shell quotes without variables.
    Shlex,
    /// systemd: C escapes inside and outside of quotes.
    Systemd,
}

/// The words of a command line, or the syntax error.
pub fn split(text: &str, style: QuoteStyle) -> Result<Vec<String>, &'static str> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match c {
            c if c.is_whitespace() => words.extend(word.take()),
            '\'' | '"' => {
                let word = word.get_or_insert_default();
                loop {
                    match chars.next().ok_or("a quote is not closed")? {
                        end if end == c => break,
                        '\\' if style == QuoteStyle::Systemd => word.push(c_escape(&mut chars)?),
                        '\\' if c == '"' => match chars.next().ok_or("the text ends with a backslash")? {
                            plain @ ('"' | '\\') => word.push(plain),
                            other => word.extend(['\\', other]),
                        },
                        other => word.push(other),
                    }
                }
            }
            '\\' if style == QuoteStyle::Systemd => word.get_or_insert_default().push(c_escape(&mut chars)?),
            '\\' => word.get_or_insert_default().push(chars.next().ok_or("the text ends with a backslash")?),
            c => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    Ok(words)
}

/// The character of a systemd escape sequence.
fn c_escape(chars: &mut std::str::Chars<'_>) -> Result<char, &'static str> {
    let first = chars.next().ok_or("the text ends with a backslash")?;
    let (radix, digits, begin) = match first {
        'x' => (16, 2, None),
        'u' => (16, 4, None),
        'U' => (16, 8, None),
        '0'..='7' => (8, 3, Some(first)),
        'n' => return Ok('\n'),
        't' => return Ok('\t'),
        'r' => return Ok('\r'),
        's' => return Ok(' '),
        'a' => return Ok('\u{7}'),
        'b' => return Ok('\u{8}'),
        'f' => return Ok('\u{c}'),
        'v' => return Ok('\u{b}'),
        other => return Ok(other),
    };
    let text: String = begin.into_iter().chain(chars).take(digits).collect();
    let code = u32::from_str_radix(&text, radix).ok().filter(|_| text.len() == digits);
    code.and_then(char::from_u32).filter(|c| *c != '\0').ok_or("an escape is not a valid character")
}

/// Joins words to a manifest command, quoted for the shell, with Abide's variables.
pub fn command(words: &[String]) -> String {
    words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ")
}

fn quoted(word: &str) -> String {
    if word.is_empty() {
        return "''".to_owned();
    }
    let mut out = String::new();
    let mut rest = word;
    while let Some(at) = rest.find(MARKS) {
        out.push_str(&plain(&rest[..at]));
        let mut inner = rest[at..].chars();
        let mark = inner.next();
        rest = inner.as_str();
        if mark == Some(INSTANCE) {
            out.push_str("${instance}");
            continue;
        }
        let (name, after) = rest.split_once(END).unwrap_or((rest, ""));
        rest = after;
        match mark {
            Some(SPLIT_VARIABLE) => out.push_str(&format!("${name}")),
            _ => out.push_str(&format!("\"${name}\"")),
        }
    }
    out.push_str(&plain(rest));
    out
}

fn plain(text: &str) -> String {
    // An option with a value needs no quotes; any other word with `=` might be an assignment.
    let option =
        text.starts_with('-') && text.chars().all(|c| c.is_ascii_alphanumeric() || "_./-=:,@".contains(c));
    match text {
        "" => String::new(),
        text if option => text.to_owned(),
        text => variables::escape(&shell_words::quote(text)),
    }
}

/// A text outside of commands, in manifest syntax. `None` if it has a variable that only a shell can replace.
pub fn template(text: &str) -> Option<String> {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(MARKS) {
        out.push_str(&variables::escape(&rest[..at]));
        // A `$` directly before a variable would escape it.
        if !rest[at..].starts_with(INSTANCE) || out.ends_with('$') {
            return None;
        }
        out.push_str("${instance}");
        rest = &rest[at + INSTANCE.len_utf8()..];
    }
    out.push_str(&variables::escape(rest));
    Some(out)
}

/// A literal text, escaped for a manifest.
pub fn escaped(text: &str) -> String {
    variables::escape(text)
}

/// Name of the program that a command runs, as /proc/PID/exe or the first argument shows it.
pub fn program(words: &[String]) -> String {
    let first = words.first().map(String::as_str).unwrap_or_default();
    let name = first.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    let clear: String = name.chars().filter(|c| !MARKS.contains(c)).collect();
    match clear.replace("${", "-") {
        name if name.is_empty() => "sh".to_owned(),
        name => name,
    }
}

pub fn join_path(folder: &str, name: &str) -> String {
    format!("{}/{name}", folder.trim_end_matches('/'))
}

/// Absolute path; a relative one is resolved against a directory.
pub fn absolute_path(path: &str, folder: &str) -> String {
    if path.starts_with('/') {
        path.to_owned()
    } else {
        join_path(folder, path.strip_prefix("./").unwrap_or(path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_follow_the_quoting_style() {
        for (text, style, words) in [
            ("a  b\tc", QuoteStyle::Shlex, vec!["a", "b", "c"]),
            (r#"sh -c "echo \"x\" '$Y' \n""#, QuoteStyle::Shlex, vec!["sh", "-c", r#"echo "x" '$Y' \n"#]),
            (r"a\ b 'c d'e # f", QuoteStyle::Shlex, vec!["a b", "c de", "#", "f"]),
            (r#"echo "a\tb" \x41 \101 ''"#, QuoteStyle::Systemd, vec!["echo", "a\tb", "A", "A", ""]),
        ] {
            assert_eq!(split(text, style).unwrap(), words, "{text}");
        }
        for (text, style) in [
            ("'a", QuoteStyle::Shlex),
            ("a\\", QuoteStyle::Shlex),
            (r"\xZZ", QuoteStyle::Systemd),
            (r"\x00", QuoteStyle::Systemd),
        ] {
            assert!(split(text, style).is_err(), "{text}");
        }
    }

    #[test]
    fn words_are_quoted_for_the_shell() {
        let words = ["./run", "a b", "$HOME", "it's", "${X}", ""].map(str::to_owned);
        let joined = command(&words);
        assert_eq!(joined, "./run 'a b' '$HOME' 'it'\\''s' '$${X}' ''");
        assert_eq!(shell_words::split(&joined.replace("$${", "${")).unwrap(), words);
        assert_eq!(command(&[format!("--port=80{INSTANCE}")]), "--port=80${instance}");
        assert_eq!(command(&[format!("{VARIABLE}X{END}/bin y")]), "\"$X\"'/bin y'");
    }

    #[test]
    fn literal_texts_are_escaped() {
        assert_eq!(template("a${b}"), Some("a$${b}".to_owned()));
        assert_eq!(template(&format!("/x/{INSTANCE}.log")), Some("/x/${instance}.log".to_owned()));
        assert_eq!(template(&format!("${INSTANCE}")), None);
        assert_eq!(template(&format!("{VARIABLE}X{END}")), None);
    }
}
