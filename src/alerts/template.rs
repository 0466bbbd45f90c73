//! Message template: a JSON text with placeholders `{{NAME}}` inside its strings.

use serde_json::Value;

/// A valid template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessageTemplate(String);

/// Reason why a template is not valid.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    #[error("the template is not valid JSON after its placeholders are filled in")]
    Json(#[from] serde_json::Error),
    #[error("unknown placeholder {{{{{name}}}}}: use {}", listed(known))]
    Placeholder { name: String, known: &'static [&'static str] },
}

/// "a, b or c".
fn listed(names: &[&str]) -> String {
    match names {
        [] => String::new(),
        [one] => (*one).to_owned(),
        [first @ .., last] => format!("{} or {last}", first.join(", ")),
    }
}

impl MessageTemplate {
    /// Checks that the template is valid JSON for any values, and has only known placeholders.
    pub fn parse(text: &str, known: &'static [&'static str]) -> Result<MessageTemplate, TemplateError> {
        let template = MessageTemplate(text.to_owned());
        let example: Vec<(&str, &str)> = known.iter().map(|name| (*name, "\"\\\n")).collect();
        serde_json::from_str::<Value>(&template.render(&example))?;
        let names = text.split("{{").skip(1).map(|rest| rest.split("}}").next().unwrap_or_default());
        match names.into_iter().find(|name| !known.contains(name)) {
            Some(name) => Err(TemplateError::Placeholder { name: name.to_owned(), known }),
            None => Ok(template),
        }
    }

    /// Fills in all placeholders in one pass: values are not expanded again.
    pub fn render(&self, values: &[(&str, &str)]) -> String {
        let mut out = String::new();
        let mut rest = self.0.as_str();
        while let Some((before, after)) = rest.split_once("{{") {
            out.push_str(before);
            let placeholder = values
                .iter()
                .find(|(name, _)| after.strip_prefix(name).is_some_and(|after| after.starts_with("}}")));
            match placeholder {
                Some((name, value)) => {
                    out.push_str(&json_escape(value));
                    rest = &after[name.len() + 2..];
                }
                None => {
                    out.push_str("{{");
                    rest = after;
                }
            }
        }
        out.push_str(rest);
        out
    }

    /// Whether it has this placeholder.
    pub fn uses(&self, name: &str) -> bool {
        self.0.contains(&format!("{{{{{name}}}}}"))
    }
}

/// A text escaped for a JSON string, without the quotes.
fn json_escape(text: &str) -> String {
    let quoted = Value::String(text.to_owned()).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const KNOWN: &[&str] = &["title", "text", "level"];

    #[test]
    fn placeholder_values_are_escaped() {
        let values = [("title", "say \"hi\""), ("text", "{{level}}\nC:\\x"), ("level", "error")];
        let template = MessageTemplate::parse(r#"{"text": "{{title}}\n{{text}}"}"#, KNOWN);
        let filled = template.expect("a template").render(&values);
        let value: Value = serde_json::from_str(&filled).expect("JSON");
        assert_eq!(value["text"], "say \"hi\"\n{{level}}\nC:\\x");
        assert!(MessageTemplate::parse("{\"a\": {{title}}}", KNOWN).is_err(), "not between quotes");
        let unknown = MessageTemplate::parse("{\"a\": \"{{titel}}\"}", KNOWN).expect_err("an unknown name");
        assert_eq!(unknown.to_string(), "unknown placeholder {{titel}}: use title, text or level");
        let nested = |text: &str| format!("{{\"nested\": {{\"a\": {{\"b\": 1}}}}, \"t\": \"{text}\"}}");
        assert!(MessageTemplate::parse(&nested("{{ text }}"), KNOWN).is_err());
        assert!(MessageTemplate::parse(&nested("{{text}}"), KNOWN).is_ok_and(|it| it.uses("text")));
    }
}
