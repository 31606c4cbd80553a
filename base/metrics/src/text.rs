//! The text format of Prometheus.

use crate::{Kind, Metric, Metrics, Sample, Value};
use std::fmt;

impl fmt::Display for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.iter().try_for_each(|metric| metric.write(f))
    }
}

impl Metric {
    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Summary => "summary",
        };
        writeln!(f, "# HELP {} {}", self.name, self.help.trim())?;
        writeln!(f, "# TYPE {} {kind}", self.name)?;
        for Sample { labels, value } in &self.samples {
            match value {
                Value::Whole(value) => self.line(f, "", labels, None, value)?,
                Value::Real(value) => self.line(f, "", labels, None, value)?,
                Value::Summary(summary) => {
                    for (quantile, value) in &summary.quantiles {
                        self.line(f, "", labels, Some(*quantile), value)?;
                    }
                    if let Some(sum) = summary.sum {
                        self.line(f, "_sum", labels, None, &sum)?;
                    }
                    self.line(f, "_count", labels, None, &summary.count)?;
                }
            }
        }
        Ok(())
    }

    fn line(
        &self,
        f: &mut fmt::Formatter<'_>,
        end: &str,
        labels: &[(&'static str, String)],
        quantile: Option<f64>,
        value: &dyn fmt::Display,
    ) -> fmt::Result {
        write!(f, "{}{end}", self.name)?;
        let quantile = quantile.map(|quantile| ("quantile", quantile.to_string()));
        let mut before = '{';
        for (name, of) in labels.iter().chain(&quantile) {
            let of = of
                .replace('\\', r"\\")
                .replace('"', "\\\"")
                .replace('\n', r"\n");
            write!(f, "{before}{name}=\"{of}\"")?;
            before = ',';
        }
        match before {
            '{' => writeln!(f, " {value}"),
            _ => writeln!(f, "}} {value}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Summary, counters};

    counters! {
        /// Counters of a test.
        pub struct Test as "lacuna_test" {
            /// Pages that
            /// the test has now.
            gauge pages,
            /// Written pages.
            counter written,
        }
    }

    #[test]
    fn the_text_is_what_prometheus_reads() {
        let mut one = Test {
            pages: 3,
            written: 7,
        };
        let mut metrics = Metrics::default();
        one.fill(&mut metrics, &[("vcpu", "0")]);
        one.merge(&{ one });
        one.fill(&mut metrics, &[("vcpu", "1")]);
        let stalls = Summary {
            count: 2,
            sum: Some(0.5),
            quantiles: vec![(0.99, 0.25)],
        };
        let of = ("lacuna_wait_seconds", "Waits.", Kind::Summary);
        metrics.add(of, &[("by", "a\"\\b")], Value::Summary(stalls));
        let rate = ("lacuna_rate", "A rate.", Kind::Gauge);
        metrics.add(rate, &[], Value::Real(1.5));
        let expected = r#"# HELP lacuna_test_pages Pages that the test has now.
# TYPE lacuna_test_pages gauge
lacuna_test_pages{vcpu="0"} 3
lacuna_test_pages{vcpu="1"} 6
# HELP lacuna_test_written_total Written pages.
# TYPE lacuna_test_written_total counter
lacuna_test_written_total{vcpu="0"} 7
lacuna_test_written_total{vcpu="1"} 14
# HELP lacuna_wait_seconds Waits.
# TYPE lacuna_wait_seconds summary
lacuna_wait_seconds{by="a\"\\b",quantile="0.99"} 0.25
lacuna_wait_seconds_sum{by="a\"\\b"} 0.5
lacuna_wait_seconds_count{by="a\"\\b"} 2
# HELP lacuna_rate A rate.
# TYPE lacuna_rate gauge
lacuna_rate 1.5
"#;
        assert_eq!(metrics.to_string(), expected);
        let mut both = Metrics::default();
        both.extend(&metrics, &[("vm", "a")]);
        both.extend(&metrics, &[("vm", "b")]);
        let text = both.to_string();
        assert_eq!(text.matches("# HELP lacuna_rate ").count(), 1);
        assert!(text.contains("lacuna_test_pages{vm=\"b\",vcpu=\"1\"} 6\n"));
    }
}
