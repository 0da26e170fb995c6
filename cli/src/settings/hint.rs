//! Finds a setting by a part of its name.

use clap::error::{ContextKind, ContextValue, ErrorKind};

use super::Settings;
use super::setting::{ResumeRule, Setting};

impl Settings {
    /// Returns the message for an unknown flag that has the name of a setting or of a value of a setting, such as
    /// `--tp-comm-overlap` or `--bf16`.
    pub fn explain_flag(&self, error: &clap::Error) -> Option<String> {
        let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else {
            return None;
        };
        let flag = flag.split('=').next()?;
        if error.kind() != ErrorKind::UnknownArgument {
            return None;
        }
        let name = flag.strip_prefix("--")?.replace('-', "_");
        let all = || self.all().filter(|setting| setting.has_flag());
        let of_name = |is_whole: bool| -> Vec<String> {
            let found = all().filter(|setting| ends_with(setting, &name, is_whole));
            found.map(sets).collect()
        };
        let of_value = || -> Vec<String> {
            // Only settings with an alias: other settings share value names such as `true`.
            let found = all().filter(|setting| setting.alias.is_some());
            let found = found.filter(|setting| setting.forms.names.iter().any(|it| it.is(&name)));
            found
                .map(|setting| format!("{} {name}", sets(setting)))
                .collect()
        };
        let found = [of_name(true), of_value(), of_name(false)];
        let found = found.into_iter().find(|found| !found.is_empty())?;
        (found.len() <= MAX_HINTS).then(|| {
            format!(
                "unexpected argument {flag}: pretrain sets {}",
                found.join(", or ")
            )
        })
    }

    /// Describes the setting with a dotted key or the last part of a key, or all settings whose keys contain the
    /// text.
    pub fn look_up(&self, text: &str) -> Option<String> {
        let text = text.trim_start_matches("--");
        let matching = |matches: &dyn Fn(&Setting) -> bool| -> Vec<&Setting> {
            let found = self.all().filter(|setting| setting.is_value());
            found.filter(|setting| matches(setting)).collect()
        };
        let name = text.replace('-', "_");
        let found = [
            matching(&|setting| setting.path == text || setting.alias.as_deref() == Some(text)),
            matching(&|setting| setting.name() == name),
            matching(&|setting| setting.path.contains(&name)),
        ];
        match &found.into_iter().find(|found| !found.is_empty())?[..] {
            [only] => Some(self.describe(only)),
            several => Some(several.iter().map(|of| format!("{}\n", of.path)).collect()),
        }
    }

    /// Returns the properties of a setting, one per line.
    fn describe(&self, setting: &Setting) -> String {
        let mut text = format!("{} = {}\n", setting.path, setting.value_text());
        let mut add = |label: &str, value: String| text += &format!("  {label:<9}{value}\n");
        add("meaning", setting.help.replace("\n\n", " "));
        for name in &setting.forms.names {
            if let Some(help) = &name.help {
                add("", format!("{}: {help}", name.text()));
            }
        }
        if let Some(default) = setting.default_text() {
            add("default", default);
        }
        if setting.has_flag() {
            let alias = setting.alias.iter().map(|alias| format!(", --{alias}"));
            add(
                "flag",
                format!("--{}{}", setting.path, alias.collect::<String>()),
            );
        }
        for condition in setting.conditions.iter().filter(|of| of.is_needed) {
            add("requires", condition.to_string());
        }
        let resume = match self.resume_rule(&setting.path) {
            ResumeRule::Fixed => "must not change, or only with --resume-allow-change",
            ResumeRule::Never => "cannot change: the checkpoint has the tensors of this value",
            ResumeRule::MayDiffer => "may change",
            ResumeRule::OrderOfSums => "may change in a run that is not deterministic",
        };
        add("resume", resume.into());
        if setting.is_experimental {
            add("state", "experimental: not tested on a GPU".into());
        }
        text
    }
}

/// Maximum number of settings in a message.
const MAX_HINTS: usize = 4;

/// Returns whether the key ends with a name. The name must match whole parts of the key, or else words of a part.
fn ends_with(setting: &Setting, name: &str, is_whole: bool) -> bool {
    let path = setting.path.replace('.', "_");
    let Some(rest) = path.strip_suffix(name) else {
        return false;
    };
    let is_part = rest.is_empty() || setting.path[rest.len() - 1..].starts_with('.');
    is_part || !is_whole && rest.ends_with('_')
}

/// Describes the flag that sets a setting.
fn sets(setting: &Setting) -> String {
    let flag = setting.alias.as_ref().unwrap_or(&setting.path);
    format!("{} with --{flag}", setting.path)
}
