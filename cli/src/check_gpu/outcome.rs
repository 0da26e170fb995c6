//! Results of checks, as text and as JSON.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Findings of a check.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Findings {
    /// The reason why nothing was checked, if the check does not apply to the device.
    pub not_run: Option<String>,
    pub rows: Vec<Finding>,
}

/// Result of a single comparison or measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    pub name: String,
    /// The measured value.
    pub value: String,
    /// The fault, and a way to fix it.
    pub problem: Option<String>,
}

impl Findings {
    pub fn not_run(reason: impl Into<String>) -> Self {
        Self {
            not_run: Some(reason.into()),
            rows: vec![],
        }
    }

    /// Adds information that is only reported and not checked.
    pub fn note(&mut self, name: impl Into<String>, value: impl Into<String>) {
        self.push(name, value, None);
    }

    pub fn push(
        &mut self,
        name: impl Into<String>,
        value: impl Into<String>,
        problem: Option<String>,
    ) {
        self.rows.push(Finding {
            name: name.into(),
            value: value.into(),
            problem,
        });
    }

    /// Adds a relative difference, which must not exceed `bound`.
    pub fn difference(&mut self, name: impl Into<String>, difference: f64, bound: f64) {
        // A NaN is outside the bound.
        let is_within = difference <= bound;
        let problem = (!is_within).then(|| format!("the bound is {bound:.1e}"));
        self.push(name, format!("differs by {difference:.1e}"), problem);
    }
}

/// Verdict of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verdict {
    #[serde(rename = "pass")]
    Pass,
    #[serde(rename = "fail")]
    Fail,
    #[serde(rename = "not run")]
    NotRun,
    /// The check ran on a device whose results may be wrong.
    #[serde(rename = "unchecked")]
    Unchecked,
}

/// Result of a completed check.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckResult {
    pub name: String,
    pub verdict: Verdict,
    /// The reason why the check failed or did not run.
    pub reason: Option<String>,
    pub seconds: f64,
    pub rows: Vec<Finding>,
}

impl CheckResult {
    /// Creates the result from the findings of a process or the description of its failure.
    pub fn new(
        name: String,
        findings: Result<Findings, String>,
        elapsed: Duration,
        is_unchecked: bool,
    ) -> Self {
        let (verdict, reason, rows) = match findings {
            Err(reason) => (Verdict::Fail, Some(reason), vec![]),
            Ok(Findings {
                not_run: Some(reason),
                rows,
            }) => (Verdict::NotRun, Some(reason), rows),
            Ok(Findings { rows, .. }) => {
                let problem = rows.iter().find(|row| row.problem.is_some());
                let reason = problem.map(Finding::line);
                let verdict = match reason {
                    None => Verdict::Pass,
                    Some(_) => Verdict::Fail,
                };
                (verdict, reason, rows)
            }
        };
        let verdict = match verdict {
            Verdict::Pass | Verdict::Fail if is_unchecked => Verdict::Unchecked,
            verdict => verdict,
        };
        Self {
            name,
            verdict,
            reason,
            seconds: elapsed.as_secs_f64(),
            rows,
        }
    }

    /// Creates the result of a check that was skipped because another check failed.
    pub fn not_run(name: String, reason: String) -> Self {
        Self {
            name,
            verdict: Verdict::NotRun,
            reason: Some(reason),
            seconds: 0.0,
            rows: vec![],
        }
    }

    /// Returns the line of the check, and a line for each finding that is not a comparison or has a problem.
    pub fn lines(&self) -> String {
        let verdict = match self.verdict {
            Verdict::Pass => "pass",
            Verdict::Fail => "FAIL",
            Verdict::NotRun => "not run",
            Verdict::Unchecked => "unchecked",
        };
        let compared = self.rows.iter().filter(|row| row.is_difference()).count();
        let compared = match compared {
            0 => String::new(),
            count => format!("{count} comparisons"),
        };
        let about = match (&self.reason, self.rows.is_empty()) {
            (Some(reason), _) if self.verdict == Verdict::NotRun || self.rows.is_empty() => {
                reason.clone()
            }
            _ => compared,
        };
        let mut lines = format!(
            "{:<13} {verdict:<9} {:>6.1} s  {about}\n",
            self.name, self.seconds
        );
        for row in &self.rows {
            let is_wrong = row.problem.is_some() && self.verdict == Verdict::Fail;
            if !row.is_difference() || is_wrong {
                lines += &format!("    {}\n", row.line());
            }
        }
        lines
    }
}

impl Finding {
    fn is_difference(&self) -> bool {
        self.value.starts_with("differs by")
    }

    fn line(&self) -> String {
        let Self {
            name,
            value,
            problem,
        } = self;
        match problem {
            Some(problem) => format!("{name}: {value}; {problem}"),
            None => format!("{name}: {value}"),
        }
    }
}

/// Report with all results.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub version: String,
    pub device: String,
    /// Whether every check passed or does not apply to the device.
    pub ok: bool,
    /// Whether results were not compared with the CPU.
    pub unchecked: bool,
    pub checks: Vec<CheckResult>,
    /// The reason why later checks cannot run.
    #[serde(skip)]
    pub obstacle: Option<String>,
}

impl Report {
    pub fn new(device: String, unchecked: bool) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").into(),
            device,
            ok: true,
            unchecked,
            checks: vec![],
            obstacle: None,
        }
    }

    pub fn header(&self) -> String {
        let unchecked = match self.unchecked {
            true => "; UNCHECKED: results may be wrong, and are not compared",
            false => "",
        };
        format!(
            "burn-megatron {} on {}{unchecked}\n",
            self.version, self.device
        )
    }

    pub fn add(&mut self, result: CheckResult) {
        self.ok &= result.verdict != Verdict::Fail;
        self.checks.push(result);
    }

    /// Returns the last line of the report.
    pub fn summary(&self) -> String {
        let failed = self.checks.iter();
        let failed = failed.filter(|check| check.verdict == Verdict::Fail);
        let failed: Vec<_> = failed.map(|check| &check.name[..]).collect();
        match (failed.as_slice(), self.unchecked) {
            ([], true) => "\nunchecked: nothing was compared".into(),
            ([], false) => "\nall checks pass".into(),
            (failed, _) => format!("\nFAIL: {}", failed.join(", ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(findings: Result<Findings, String>, is_unchecked: bool) -> CheckResult {
        CheckResult::new("of-a-test".into(), findings, Duration::ZERO, is_unchecked)
    }

    #[test]
    fn a_difference_beyond_its_bound_fails_the_check() {
        let mut findings = Findings::default();
        findings.difference("norm in F32", 1e-7, 1e-5);
        assert_eq!(result(Ok(findings.clone()), false).verdict, Verdict::Pass);
        findings.difference("loss in F32", f64::NAN, 1e-5);
        let failed = result(Ok(findings.clone()), false);
        assert_eq!(failed.verdict, Verdict::Fail);
        assert!(failed.lines().contains("loss in F32: differs by NaN"));
        assert!(!failed.lines().contains("norm"));
        assert_eq!(result(Ok(findings), true).verdict, Verdict::Unchecked);
    }

    #[test]
    fn a_report_fails_with_its_failed_checks() {
        let mut report = Report::new("cuda".into(), false);
        report.add(result(Ok(Findings::not_run("NCCL is for cuda")), false));
        assert!(report.ok);
        assert_eq!(report.summary(), "\nall checks pass");
        report.add(result(Err("no result after 2 s".into()), false));
        assert!(!report.ok);
        assert_eq!(report.summary(), "\nFAIL: of-a-test");
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["checks"][0]["verdict"], "not run");
        assert_eq!(json["checks"][1]["reason"], "no result after 2 s");
    }
}
