//! Generates the reference page of the book: every setting with its values, its default, its flag and its rules.

use std::fmt::Write;

use super::Settings;
use super::setting::{ResumeRule, Setting};

const INTRODUCTION: &str = "# Settings reference

This page lists every setting of a recipe. It is generated from the config structs: run
`BURN_MEGATRON_WRITE_REFERENCE=1 cargo test -p burn-megatron-cli reference` after a change of a setting.

A setting has the same name everywhere: `tensor` below `[parallel]` in a recipe, `--set parallel.tensor=2` and
`--parallel.tensor 2` on the command line. Some settings have a short flag in addition.

The default on this page is the value of a recipe that does not set the key. `pretrain` without `--recipe` starts from a
small recipe that sets more: `pretrain --print-recipe` shows each value and where it is from.

`N` is a whole number, `NUMBER` any number, `BOOL` is `true` or `false`, and `BYTES` is a size such as `2GiB`. `TABLE` is a
table of the keys below it. Its flag alone, as in `--train.ema`, turns it on with the defaults of its keys. A flag
removes an optional setting by the value `none`, and takes a list with commas: `a,b`, or `{x=1},{x=2}` for tables. `--set`
takes the same values, or values in TOML. The pages of the book describe the keys of tables in a list.

A resumed run must have the same settings, except settings that *a resumed run may change*. `--resume-allow-change KEY`
allows another change, such as a larger `train.steps` to train longer. A setting that *a resumed run cannot change*
decides which tensors a checkpoint has. An *experimental* setting has a flag that `--help` does not list.
`burn-megatron config KEY` prints the facts of one setting.
";

impl Settings {
    /// Returns the page in Markdown.
    pub fn reference(&self) -> String {
        let mut page = INTRODUCTION.to_string();
        let mut table = None;
        for setting in self.all().filter(|setting| setting.is_value()) {
            let of = setting.path.split('.').next().filter(|of| *of != "base");
            if table != Some(of) {
                table = Some(of);
                let title = of.map_or("Top level".into(), |of| format!("`[{of}]`"));
                let help = of
                    .and_then(|of| self.find(of))
                    .map(|table| sentence(&table.help));
                let _ = write!(page, "\n## {title}\n\n{}\n\n", help.unwrap_or_default());
            }
            page.push_str(&self.entry(setting));
        }
        page.replace("\n\n\n\n", "\n\n")
    }

    fn entry(&self, setting: &Setting) -> String {
        let mut entry = format!("- `{}`: ", setting.path);
        let _ = write!(entry, "`{}`", setting.value_text());
        match setting.default_text() {
            Some(text) if setting.default_varies => entry += &format!(", default {text}"),
            Some(text) => entry += &format!(", default `{text}`"),
            None => {}
        }
        if let Some(alias) = &setting.alias {
            let _ = write!(entry, ", short flag `--{alias}`");
        }
        entry.push_str(". ");
        entry.push_str(&sentence(&setting.help.replace("\n\n", " ")));
        for name in &setting.forms.names {
            if let Some(help) = &name.help {
                let _ = write!(entry, " `{}`: {}", name.text(), sentence(help));
            }
        }
        let needed = setting
            .conditions
            .iter()
            .filter(|condition| condition.is_needed);
        for condition in needed {
            let _ = write!(entry, " Requires `{condition}`.");
        }
        if setting.is_experimental {
            entry.push_str(" *Experimental: not tested on a GPU.*");
        }
        entry.push_str(match self.resume_rule(&setting.path) {
            ResumeRule::Fixed => "",
            ResumeRule::Never => " *A resumed run cannot change it.*",
            ResumeRule::MayDiffer => " *A resumed run may change it.*",
            ResumeRule::OrderOfSums => {
                " *A resumed run may change it, unless the run is deterministic.*"
            }
        });
        entry.push('\n');
        entry
    }
}

/// Returns the text with a period at the end.
fn sentence(text: &str) -> String {
    match text.chars().next_back() {
        None | Some('.') => text.into(),
        Some(_) => format!("{text}."),
    }
}
