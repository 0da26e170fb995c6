//! The flags of QK-Clip.

use clap::Args;

use crate::recipe::Recipe;

/// Flags of the limit of attention logits; each overrides a key of `[train]`.
#[derive(Args, Debug, Default)]
#[command(next_help_heading = "Training")]
pub struct QkClipArgs {
    /// Scale down the queries and keys of heads whose attention logits exceed a threshold, after each step (QK-Clip).
    #[arg(long)]
    pub qk_clip: bool,
    /// The largest attention logit that is left as it is; with --qk-clip, which it implies.
    #[arg(long, value_name = "LOGIT")]
    pub qk_clip_threshold: Option<f64>,
    /// The share of queries in what is taken from a logit, above 0 and below 1; with --qk-clip, which it implies.
    #[arg(long, value_name = "SHARE")]
    pub qk_clip_alpha: Option<f64>,
    /// Log the largest attention logit of each step. With --qk-clip it always is.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub log_max_attention_logit: Option<bool>,
}

impl QkClipArgs {
    /// Applies the flags to a recipe.
    pub fn apply(&self, recipe: &mut Recipe) {
        let train = &mut recipe.train;
        if self.qk_clip || self.qk_clip_threshold.is_some() || self.qk_clip_alpha.is_some() {
            let mut clip = train.qk_clip.unwrap_or_default();
            clip.threshold = self.qk_clip_threshold.unwrap_or(clip.threshold);
            clip.alpha = self.qk_clip_alpha.unwrap_or(clip.alpha);
            train.qk_clip = Some(clip);
        }
        let logs = &mut train.log_max_attention_logit;
        *logs = self.log_max_attention_logit.unwrap_or(*logs);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::family::Families;
    use crate::flags::parse_text;
    use crate::recipe::DEFAULT_RECIPE;

    #[test]
    fn flags_turn_it_on_and_change_it() {
        let resolve = |flags: &str| {
            let families = Families::transformers();
            let args = parse_text(flags).unwrap();
            let train = Recipe::resolve(&args, &families, DEFAULT_RECIPE).unwrap();
            let train = train.recipe.train;
            let clip = train.qk_clip.map(|clip| (clip.threshold, clip.alpha));
            (clip, train.log_max_attention_logit)
        };
        assert_eq!(resolve(""), (None, false));
        assert_eq!(resolve("--log-max-attention-logit"), (None, true));
        assert_eq!(resolve("--qk-clip"), (Some((100.0, 0.5)), false));
        assert_eq!(
            resolve("--qk-clip-threshold 30"),
            (Some((30.0, 0.5)), false)
        );
        let both = resolve("--set train.qk_clip.threshold=7.0 --qk-clip-alpha 0.25");
        assert_eq!(both, (Some((7.0, 0.25)), false));
    }
}
