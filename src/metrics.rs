//! Metrics in the Prometheus text format: the encoder.

use std::fmt::{Display, Write};

/// A page of metrics.
#[derive(Debug, Default)]
pub struct MetricsText(String);

impl MetricsText {
    /// Starts a family. `kind`: counter, gauge or histogram.
    pub fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    pub fn line(&mut self, name: &str, labels: &[(&str, &str)], value: impl Display) {
        self.0.push_str(name);
        for (nth, (label, value)) in labels.iter().enumerate() {
            let _ = write!(self.0, "{}{label}=\"{}\"", if nth == 0 { '{' } else { ',' }, escaped(value));
        }
        let _ = writeln!(self.0, "{} {value}", if labels.is_empty() { "" } else { "}" });
    }

    /// A family with one sample and no labels.
    pub fn single(&mut self, name: &str, kind: &str, help: &str, value: impl Display) {
        self.head(name, kind, help);
        self.line(name, &[], value);
    }

    /// `buckets`: upper bound and number of observations, not cumulative.
    pub fn histogram(
        &mut self,
        name: &str,
        help: &str,
        buckets: impl Iterator<Item = (f64, u64)>,
        seconds: f64,
        all: u64,
    ) {
        self.head(name, "histogram", help);
        let (bucket, mut sum) = (format!("{name}_bucket"), 0);
        for (most, n) in buckets {
            sum += n;
            self.line(&bucket, &[("le", &most.to_string())], sum);
        }
        self.line(&bucket, &[("le", "+Inf")], all);
        self.line(&format!("{name}_sum"), &[], seconds);
        self.line(&format!("{name}_count"), &[], all);
    }

    pub fn into_text(self) -> String {
        self.0
    }
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_have_help_type_and_escaped_labels() {
        let mut page = MetricsText::default();
        page.single("a", "gauge", "One.", 1);
        page.head("b_total", "counter", "Two.");
        page.line("b_total", &[("x", "say \"hi\"\n"), ("y", "\\")], 2);
        page.histogram("c_seconds", "Three.", [(0.5, 1), (1.0, 2)].into_iter(), 2.5, 4);
        let expected = r##"# HELP a One.
# TYPE a gauge
a 1
# HELP b_total Two.
# TYPE b_total counter
b_total{x="say \"hi\"\n",y="\\"} 2
# HELP c_seconds Three.
# TYPE c_seconds histogram
c_seconds_bucket{le="0.5"} 1
c_seconds_bucket{le="1"} 3
c_seconds_bucket{le="+Inf"} 4
c_seconds_sum 2.5
c_seconds_count 4
"##;
        assert_eq!(page.into_text(), expected);
    }
}
