//! Error chains: an error and its causes in one line.

use std::error::Error;

/// The text of an error, followed by the texts of its causes.
pub fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = String::new();
    for error in causes(error) {
        let layer = error.to_string();
        // Some errors repeat the text of their source.
        if text.is_empty() || !text.contains(&layer) {
            text.push_str(if text.is_empty() { "" } else { ": " });
            text.push_str(&layer);
        }
    }
    text
}

/// An error and its causes, outermost first.
pub fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |error| (*error).source())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct Layer {
        text: &'static str,
        source: Option<Box<Layer>>,
    }

    #[test]
    fn a_chain_names_each_cause_once() {
        let inner = Layer { text: "permission denied", source: None };
        let middle = Layer { text: "a.yaml: permission denied", source: Some(Box::new(inner)) };
        let outer = Layer { text: "cannot read the apps", source: Some(Box::new(middle)) };
        assert_eq!(chain(&outer), "cannot read the apps: a.yaml: permission denied");
    }
}
