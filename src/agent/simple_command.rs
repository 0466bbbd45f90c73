//! Simple commands: those that run without a shell.

/// The words of a command that needs no shell; `None`: the command needs one.
pub fn split_simple_command(command: &str) -> Option<Vec<String>> {
    const SYNTAX: &str = "|&;<>()$`\\\"'*?[]#~{}!\n\r";
    #[rustfmt::skip]
    const BUILTINS: [&str; 52] = [
        ".", ":", "[", "alias", "bg", "break", "case", "cd", "command", "continue", "do", "done", "echo", "elif",
        "else", "esac", "eval", "exec", "exit", "export", "fg", "fi", "for", "function", "getopts", "hash", "if",
        "in", "jobs", "kill", "local", "printf", "pwd", "read", "readonly", "return", "select", "set", "shift",
        "test", "then", "time", "times", "trap", "type", "ulimit", "umask", "unalias", "unset", "until", "wait",
        "while",
    ];
    if command.chars().any(|c| SYNTAX.contains(c)) {
        return None;
    }
    let words: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
    let first = words.first()?;
    let is_assignment = first.contains('=');
    (!is_assignment && !BUILTINS.contains(&first.as_str())).then_some(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_is_used_where_one_is_needed() {
        let words = |command: &str| split_simple_command(command).map(|words| words.join("|"));
        assert_eq!(words("./run  --port 80").as_deref(), Some("./run|--port|80"));
        assert_eq!(words("python3 -m http.server").as_deref(), Some("python3|-m|http.server"));
        for shell in [
            "A=1 ./run",
            "./run > log",
            "cd /x && ./run",
            "exec ./run",
            "echo hi",
            "./run $HOME",
            "./run 'a b'",
            "",
            "  ",
            "a\nb",
        ] {
            assert_eq!(words(shell), None, "{shell}");
        }
    }
}
