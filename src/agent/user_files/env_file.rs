//! Environment file: variables of a launch, one `NAME=VALUE` per line, in the syntax of systemd's EnvironmentFile.
//!
//! Blank lines, and lines that begin with `#` or `;`, are skipped. A value is unquoted or quoted, and quoted parts may
//! follow each other. Unquoted, a backslash keeps the next character, and blanks at both ends are removed. Between double
//! quotes a backslash keeps `"`, `\`, `` ` `` and `$`, and stays before any other character. Between single quotes every
//! character counts. A backslash at the end of a line continues the line, except between single quotes; quoted values may
//! have several lines. Of equal names the last one counts.
//!
//! Unlike systemd, a line that is not an assignment is an error: a variable must not be lost silently. An error names the
//! line and never its content, which may be a secret.

/// Reason why an environment file cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line} {problem}")]
pub struct EnvFileError {
    pub line: usize,
    pub problem: &'static str,
}

/// Parses the text of an environment file.
pub fn parse(text: &str) -> Result<Vec<(String, String)>, EnvFileError> {
    let mut reader = Reader { rest: text.chars().peekable(), line: 1 };
    let mut variables = Vec::new();
    while reader.skip_to_assignment() {
        let line = reader.line;
        let fails = |problem| EnvFileError { line, problem };
        let name = reader.name().ok_or(fails("is not NAME=VALUE"))?;
        if !is_name(&name) {
            return Err(fails("has an invalid name: use letters, digits and underscores"));
        }
        let value = reader.value()?;
        if value.contains('\0') {
            return Err(fails("contains a NUL byte"));
        }
        variables.push((name, value));
    }
    Ok(variables)
}

fn is_name(name: &str) -> bool {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    name.chars().all(is_word) && name.starts_with(|c: char| !c.is_ascii_digit())
}

struct Reader<'a> {
    rest: std::iter::Peekable<std::str::Chars<'a>>,
    line: usize,
}

impl Reader<'_> {
    fn next(&mut self) -> Option<char> {
        let next = self.rest.next();
        self.line += usize::from(next == Some('\n'));
        next
    }

    fn skip_blanks(&mut self) {
        while self.rest.next_if(|c| matches!(c, ' ' | '\t' | '\r')).is_some() {}
    }

    /// Skips blank lines and comments. False: the text is over.
    fn skip_to_assignment(&mut self) -> bool {
        loop {
            self.skip_blanks();
            match self.rest.peek() {
                None => return false,
                Some('\n') => drop(self.next()),
                Some('#' | ';') => self.skip_comment(),
                Some(_) => return true,
            }
        }
    }

    /// A comment goes to the end of its line, or of the next one after a backslash.
    fn skip_comment(&mut self) {
        while let Some(c) = self.next() {
            match c {
                '\n' => return,
                '\\' => drop(self.next()),
                _ => {}
            }
        }
    }

    /// The text before `=`; `None`: the line has none.
    fn name(&mut self) -> Option<String> {
        let mut name = String::new();
        while let Some(c) = self.rest.next_if(|c| *c != '\n') {
            if c == '=' {
                return Some(name.trim_end().to_owned());
            }
            name.push(c);
        }
        None
    }

    fn value(&mut self) -> Result<String, EnvFileError> {
        let mut value = String::new();
        loop {
            self.skip_blanks();
            match self.rest.peek() {
                None | Some('\n') => return Ok(value),
                Some('\'') => self.single_quoted(&mut value)?,
                Some('"') => self.double_quoted(&mut value)?,
                Some(_) => return Ok(self.unquoted(value)),
            }
        }
    }

    /// An unquoted value extends to the end of the line.
    fn unquoted(&mut self, mut value: String) -> String {
        // Blanks that were escaped stay.
        let mut kept = value.len();
        while let Some(c) = self.rest.next_if(|c| *c != '\n') {
            match c {
                '\\' => match self.next() {
                    Some('\n') | None => {}
                    Some(escaped) => {
                        value.push(escaped);
                        kept = value.len();
                    }
                },
                c => {
                    value.push(c);
                    if !c.is_ascii_whitespace() {
                        kept = value.len();
                    }
                }
            }
        }
        value.truncate(kept);
        value
    }

    fn single_quoted(&mut self, value: &mut String) -> Result<(), EnvFileError> {
        let line = self.line;
        self.next();
        while let Some(c) = self.next() {
            match c {
                '\'' => return Ok(()),
                c => value.push(c),
            }
        }
        Err(EnvFileError { line, problem: "has a quote that is not closed" })
    }

    fn double_quoted(&mut self, value: &mut String) -> Result<(), EnvFileError> {
        let line = self.line;
        self.next();
        while let Some(c) = self.next() {
            match c {
                '"' => return Ok(()),
                '\\' => match self.next() {
                    Some('\n') | None => {}
                    Some(escaped @ ('"' | '\\' | '`' | '$')) => value.push(escaped),
                    Some(other) => value.extend(['\\', other]),
                },
                c => value.push(c),
            }
        }
        Err(EnvFileError { line, problem: "has a quote that is not closed" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(text: &str) -> String {
        let parsed = parse(text).expect("valid");
        let [(name, value)] = parsed.as_slice() else { panic!("{parsed:?}") };
        assert_eq!(name, "A");
        value.clone()
    }

    #[test]
    fn values_are_read_as_systemd_reads_them() {
        for (text, value) in [
            ("A=b", "b"),
            ("  A = b c  ", "b c"),
            ("A=b\r\n", "b"),
            ("A=", ""),
            ("A=b#c ; d", "b#c ; d"),
            ("A='b $c \\'", "b $c \\"),
            ("A=\"b \\\" \\$c \\n\"", "b \" $c \\n"),
            ("A='one'\"two\" 'three'", "onetwothree"),
            ("A=\"one\ntwo\"", "one\ntwo"),
            ("A=one\\\ntwo", "onetwo"),
            ("A=one\\ ", "one "),
            ("A=a\\\\b", "a\\b"),
            ("# B=1\n; C=2 \\\nstill a comment\n\nA=ü", "ü"),
            ("A=a=b", "a=b"),
        ] {
            assert_eq!(one(text), value, "{text:?}");
        }
        let both = parse("A=1\nB='2'\nA=3\n").expect("valid");
        let names: Vec<&str> = both.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["A", "B", "A"]);
        assert_eq!(parse("").expect("valid"), []);
        assert_eq!(parse("#").expect("valid"), []);
    }

    #[test]
    fn an_error_names_the_line_and_not_its_content() {
        for (text, error) in [
            ("A=1\nhunter2\n", "line 2 is not NAME=VALUE"),
            ("\n\n=hunter2", "line 3 has an invalid name: use letters, digits and underscores"),
            ("export A=hunter2", "line 1 has an invalid name: use letters, digits and underscores"),
            ("1A=hunter2", "line 1 has an invalid name: use letters, digits and underscores"),
            ("A-B=hunter2", "line 1 has an invalid name: use letters, digits and underscores"),
            ("A=1\nB='hunter2\n", "line 2 has a quote that is not closed"),
            ("A=\"hunter2\\", "line 1 has a quote that is not closed"),
            ("A=hun\0ter2", "line 1 contains a NUL byte"),
            ("A=1\nhunter2", "line 2 is not NAME=VALUE"),
        ] {
            let found = parse(text).expect_err("an error").to_string();
            assert_eq!(found, error);
            assert!(!found.contains("hunter2"));
        }
    }
}
