//! Escaping of untrusted text for terminals, HTML, XML and markdown.
//!
//! No name, message or value becomes a control sequence or markup.

/// Whether a character controls a terminal or changes the display of the text around it.
pub fn is_hidden(c: char) -> bool {
    matches!(
        c,
        '\0'..='\u{8}' | '\u{b}' | '\u{c}' | '\u{e}'..='\u{1f}' | '\u{7f}'..='\u{9f}' | '\u{61c}'
            | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}'
    )
}

/// Zero-width characters, look-alike spaces, and tags.
fn is_invisible(c: char) -> bool {
    matches!(c, '\u{a0}' | '\u{ad}' | '\u{180e}' | '\u{200b}'..='\u{200d}' | '\u{2060}'..='\u{2064}' | '\u{e0000}'..='\u{e007f}')
}

/// A text on one line, with control and invisible characters escaped visibly.
pub fn visible(text: &str) -> String {
    let odd = |c: char| c.is_control() || is_hidden(c) || is_invisible(c);
    let escape = |c: char| match odd(c) {
        true if matches!(c, '\n' | '\r' | '\t') => c.escape_debug().to_string(),
        true => c.escape_unicode().to_string(),
        false => c.to_string(),
    };
    if text.chars().any(odd) { text.chars().map(escape).collect() } else { text.to_owned() }
}

/// The same per line; line breaks are kept.
pub fn visible_lines(text: &str) -> String {
    text.lines().map(visible).collect::<Vec<_>>().join("\n")
}

/// Lines of a log for a terminal: line breaks, tabs and colours are kept, other control characters are escaped.
pub fn terminal_text(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let colour = rest.strip_prefix("\u{1b}[").and_then(|sequence| {
            let end = sequence.find(|c: char| !c.is_ascii_digit() && c != ';' && c != ':')?;
            sequence[end..].starts_with('m').then_some(2 + end + 1)
        });
        let length = colour.unwrap_or(c.len_utf8());
        match c {
            _ if colour.is_some() => out.push_str(&rest[..length]),
            '\n' | '\t' => out.push(c),
            '\r' if rest[1..].starts_with('\n') => {}
            c if c.is_control() || is_hidden(c) => out.extend(c.escape_default()),
            c => out.push(c),
        }
        rest = &rest[length..];
    }
    out
}

/// The entity of a markup character in HTML and XML. `apostrophe`: HTML 4 does not define `&apos;`.
fn entity(c: char, apostrophe: &'static str) -> Option<&'static str> {
    match c {
        '&' => Some("&amp;"),
        '<' => Some("&lt;"),
        '>' => Some("&gt;"),
        '"' => Some("&quot;"),
        '\'' => Some(apostrophe),
        _ => None,
    }
}

/// A text for a quoted HTML attribute or between tags. Bidirectional controls and invisible characters are replaced.
pub fn html(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match (entity(c, "&#39;"), c) {
            (Some(entity), _) => out.push_str(entity),
            (None, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}') => {
                out.push('\u{fffd}')
            }
            (None, c) => out.push(c),
        }
    }
    out
}

/// A text for a double-quoted XML attribute or between tags. Characters that XML 1.0 forbids are replaced; line ends and
/// tabs are character references, because a parser would turn them into spaces.
pub fn xml(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match (entity(c, "&apos;"), c) {
            (Some(entity), _) => out.push_str(entity),
            (None, '\n') => out.push_str("&#10;"),
            (None, '\t') => out.push_str("&#9;"),
            (None, '\r') => out.push_str("&#13;"),
            // Invalid in XML 1.0; C1 controls are valid, but never intended.
            (None, c) if c.is_control() || matches!(c as u32 & 0xffff, 0xfffe | 0xffff) => {
                out.push('\u{fffd}')
            }
            (None, c) => out.push(c),
        }
    }
    out
}

/// A markdown code span on one line: its text cannot be a link, a mention or HTML, and cannot end the span.
pub fn code(text: &str) -> String {
    let text = one_line(text);
    // An empty span would be read as an opening fence of two backticks.
    if text.trim().is_empty() {
        return "` `".to_owned();
    }
    let fence = "`".repeat(longest_run(&text) + 1);
    let pad = if text.starts_with('`') || text.ends_with('`') { " " } else { "" };
    format!("{fence}{pad}{text}{pad}{fence}")
}

/// A markdown code block with this indent: each line of the text is a line of the block, and none ends it.
pub fn block(text: &str, indent: &str) -> String {
    let fence = "`".repeat((longest_run(text) + 1).max(3));
    // A carriage return ends a line in markdown: the next line would lose the indent and end the block.
    let text = text.replace("\r\n", "\n").replace('\r', "\n");
    let lines: String = text.lines().map(|line| format!("{indent}{}\n", one_line(line))).collect();
    format!("{indent}{fence}text\n{lines}{indent}{fence}\n")
}

fn one_line(text: &str) -> String {
    let spaced: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    visible(&spaced)
}

fn longest_run(text: &str) -> usize {
    text.split(|c| c != '`').map(str::len).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_colours_a_terminal_and_does_nothing_else_to_it() {
        let log = "a\tb\r\n\u{1b}[1;31mred\u{1b}[m\n\u{1b}[2J\u{1b}]0;title\u{7}\rover\u{1b}[31";
        let shown = "a\tb\n\u{1b}[1;31mred\u{1b}[m\n\\u{1b}[2J\\u{1b}]0;title\\u{7}\\rover\\u{1b}[31";
        assert_eq!(terminal_text(log), shown);
    }
    use proptest::prelude::*;

    #[test]
    fn no_text_becomes_markup() {
        assert_eq!(html("<a href=\"x\">'&\u{202e}"), "&lt;a href=&quot;x&quot;&gt;&#39;&amp;\u{fffd}");
        assert_eq!(code("a"), "`a`");
        assert_eq!(code("a `b` c"), "``a `b` c``");
        assert_eq!(code("`"), "`` ` ``");
        assert_eq!(code("a\nb\r# c"), "`a b # c`");
        assert_eq!(code(""), "` `");
        assert_eq!(block("a\r# b\n```\n", "  "), "  ````text\n  a\n  # b\n  ```\n  ````\n");
        assert_eq!(
            xml("a\n<b c=\"d\">&'\u{0}\u{ffff}"),
            "a&#10;&lt;b c=&quot;d&quot;&gt;&amp;&apos;\u{fffd}\u{fffd}"
        );
    }

    fn nasty() -> impl Strategy<Value = String> {
        let parts = [
            "`",
            "``",
            "```",
            "~~~",
            "|",
            "\n",
            "\r",
            "\r\n",
            "\n\n",
            "<img src=x>",
            "<!--",
            "-->",
            "]]>",
            "&amp;",
            "@team",
            "[a](http://h)",
            "# h",
            "\"",
            "'",
            "\0",
            "\u{b}",
            "\u{85}",
            "\u{2028}",
            "\u{202e}",
            "\u{fffe}",
            "\u{1ffff}",
            "  ",
            "\t",
            "x",
            "::error::",
        ];
        proptest::collection::vec(proptest::sample::select(parts.to_vec()), 0..12)
            .prop_map(|parts| parts.concat())
    }

    proptest! {
        #[test]
        fn xml_stays_one_value(text in nasty()) {
            let out = xml(&text);
            let allowed = |c: char| !c.is_control() && !matches!(c as u32 & 0xffff, 0xfffe | 0xffff);
            prop_assert!(out.chars().all(|c| allowed(c) && !matches!(c, '<' | '>' | '"')), "{out:?}");
            let entities = ["amp;", "lt;", "gt;", "quot;", "apos;", "#10;", "#9;", "#13;"];
            for after in out.split('&').skip(1) {
                prop_assert!(entities.iter().any(|entity| after.starts_with(entity)), "{out:?}");
            }
        }

        /// As CommonMark reads it: a span ends at the next run of exactly as many backticks.
        #[test]
        fn a_span_ends_where_it_ends(text in nasty()) {
            let out = code(&text);
            prop_assert!(!out.contains(['\n', '\r']), "{out:?}");
            let fence = out.len() - out.trim_start_matches('`').len();
            let inner = &out[fence..];
            let mut at = 0;
            let mut ends = Vec::new();
            for run in inner.split_inclusive(|c| c != '`').flat_map(|piece| {
                let ticks = piece.len() - piece.trim_start_matches('`').len();
                at += piece.len();
                (ticks > 0).then_some((at - piece.len(), ticks))
            }) {
                ends.push(run);
            }
            let first = ends.iter().find(|(_, ticks)| *ticks == fence);
            prop_assert_eq!(first.map(|(begin, ticks)| begin + ticks), Some(inner.len()), "{:?}", out);
        }

        #[test]
        fn a_block_ends_where_it_ends(text in nasty()) {
            let out = block(&text, "  ");
            let lines: Vec<&str> = out.split('\n').collect();
            prop_assert!(!out.contains('\r') && lines[..lines.len() - 1].iter().all(|line| line.starts_with("  ")));
            let fence = lines[0].trim().trim_end_matches("text").to_owned();
            let ends = |line: &&&str| line.trim().starts_with(&fence) && line.trim().trim_matches('`').is_empty();
            prop_assert_eq!(lines[1..].iter().filter(ends).count(), 1, "{:?}", out);
        }
    }
}
