use super::tests::{Folder, error, recipe, resolve};

#[test]
fn arguments_of_which_one_would_be_ignored_are_refused() {
    let folder = Folder::new();
    let file = folder.write("text.txt", "some text");
    let chat = folder.write("chat.jsonl", "{\"messages\": []}");
    for (flags, says) in [
        (
            "--no-save --checkpoint.save true",
            "--no-save conflicts with --checkpoint.save",
        ),
        (
            "--no-save --save-every 3",
            "--no-save conflicts with --checkpoint.every",
        ),
        (
            "--no-save --set checkpoint.save=true",
            "checkpoint.save is set by --set and by a flag",
        ),
        (
            "--train.schedule cosine --train.schedule.wsd.decay_steps 10",
            "--train.schedule conflicts with --train.schedule.wsd.decay_steps",
        ),
        (
            "--train.schedule.wsd.decay_steps 10 --set train.schedule=cosine",
            "--train.schedule.wsd.decay_steps conflicts with --set train.schedule",
        ),
        (
            "--train.ema none --train.ema.decay 0.9",
            "--train.ema conflicts with --train.ema.decay",
        ),
        (
            "--train.ema {decay=0.8} --train.ema.decay 0.9",
            "--train.ema conflicts with --train.ema.decay",
        ),
        (
            "--model.positions.rotary.scaling.linear.factor 2 --model.positions.rotary.scaling.llama3.factor 2",
            "conflicts with --model.positions.rotary.scaling",
        ),
        (
            "--set train.clip=1.0 --set train.clip=2.0",
            "train.clip is set by --set twice",
        ),
        (
            "--set train={clip=1.0} --set train.clip=2.0",
            "train.clip is set by --set twice",
        ),
        (
            "--kernels norm=fused,norm=unfused",
            "--kernels chooses norm twice",
        ),
        (
            "--kernels fused --kernels unfused",
            "--kernels chooses for all operations twice",
        ),
        (
            &format!("--data {file} --set data.path=other"),
            "data.path is set by --set and by a flag",
        ),
        (
            &format!("--data {chat} --set data.chat.files=[\"other.jsonl\"]"),
            "data.chat.files is set by --set and by a flag",
        ),
    ] {
        let error = error(flags);
        assert!(
            error.contains(says) && error.contains("remove one"),
            "{flags}: {error}"
        );
    }
    for flags in [
        "--no-save --checkpoint.save false",
        "--train.schedule.wsd.decay_steps 10 --train.schedule.wsd.tail linear",
        "--train.ema --train.ema.decay 0.9",
        "--kernels unfused,norm=fused",
        "--set train.ema=none --set parallel.virtual_stages=none",
        &format!("--data {chat} --set data.chat.loss=all --set data.chat.held_out=0"),
    ] {
        recipe(flags);
    }
}

#[test]
fn a_text_may_look_like_a_number() {
    for text in ["5", "true", "[1]"] {
        let recipe = recipe(&format!("--set sample.prompt={text}"));
        assert_eq!(recipe.sample.prompt, text);
    }
}

#[test]
fn a_recipe_file_may_have_the_old_name_of_a_key() {
    let folder = Folder::new();
    let file = folder.write("old.toml", "[train]\ncount_zeros = true");
    assert!(recipe(&format!("--recipe {file}")).train.count_zeros);
}

#[test]
fn what_depends_on_a_changed_setting_is_dropped_with_a_note() {
    let folder = Folder::new();
    let text = "[parallel]\ntensor = 2\nsequence_parallel = true\ndata = 2\n\
                [data_parallel]\nzero_stage = 1\noverlap_param_gather = true";
    let file = folder.write("recipe.toml", text);
    let dropped = |flags: &str| {
        let layered = resolve(&format!("--recipe {file} {flags}")).unwrap();
        layered.recipe.plan().unwrap();
        layered.dropped
    };
    assert_eq!(dropped(""), [""; 0]);
    assert_eq!(
        dropped("--tp 1"),
        ["parallel.sequence_parallel of the recipe is dropped: it requires parallel.tensor > 1"]
    );
    let gather = "data_parallel.overlap_param_gather of the recipe is dropped: it requires data_parallel.zero_stage = 1 or \
                  data_parallel.zero_stage = 2";
    assert_eq!(dropped("--zero-stage 3"), [gather]);
    assert_eq!(dropped("--zero-stage 2"), [""; 0]);
    // Values from the command line are not dropped: they cause an error.
    for (flags, says) in [
        ("--tp 1 --sp", "requires tensor parallelism, but tensor = 1"),
        (
            "--tp 1 --set parallel.sequence_parallel=true",
            "requires tensor parallelism, but tensor = 1",
        ),
        (
            "--set data_parallel.zero_stage=3",
            "overlap_param_gather requires zero_stage = 1 or 2",
        ),
        (
            "--zero-stage 3 --data_parallel.overlap_param_gather",
            "overlap_param_gather requires zero_stage = 1 or 2",
        ),
    ] {
        let error = error(&format!("--recipe {file} {flags}"));
        assert!(error.contains(says), "{flags}: {error}");
    }
    // Not reported, because no file has set the value.
    assert_eq!(resolve("--pp 1").unwrap().dropped, [""; 0]);
}
