//! Tokenizes a conversation, and selects the tokens that have a loss.

use std::ops::Range;

use super::TrainedTokens;
use super::error::ChatLineError;
use super::record::Conversation;
use super::tools;
use crate::tokenizer::Tokenizer;
use crate::tokenizer::chat::{Chat, ChatTemplate, RenderedChat};

/// The tokens of a conversation.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ChatTokens {
    pub tokens: Vec<u32>,
    /// Whether each token has a loss.
    pub is_answer: Vec<bool>,
}

/// Renders and tokenizes conversations.
#[derive(Clone, Copy)]
pub(super) struct ChatTokenizer<'a> {
    pub tokenizer: &'a Tokenizer,
    pub template: Option<&'a ChatTemplate>,
    pub loss: TrainedTokens,
}

impl ChatTokenizer<'_> {
    /// Returns the tokens of a line of JSON. `tokenizer` is a clone of [`Self::tokenizer`].
    ///
    /// # Errors
    ///
    /// [`ChatLineError`].
    pub fn line(&self, line: &str, tokenizer: &Tokenizer) -> Result<ChatTokens, ChatLineError> {
        let mut conversation = Conversation::parse(line)?;
        let tokens = match (self.template, &conversation.texts) {
            (Some(template), _) => {
                let rendered = self.rendered(template, &mut conversation)?;
                // The template already writes the special tokens.
                let tokens = tokenizer.encode_with_offsets(&rendered.text, false)?;
                marked(tokens, &rendered.answers)
            }
            (None, Some([prompt, answer])) => self.texts(prompt, answer, tokenizer)?,
            (None, None) => return Err(ChatLineError::NoTemplate(self.tokenizer.name().into())),
        };
        // The first token is never a target.
        if tokens.is_answer.iter().skip(1).any(|is_answer| *is_answer) {
            Ok(tokens)
        } else {
            Err(ChatLineError::NoTokens)
        }
    }

    /// Returns the tokens of a prompt, an answer and the end token.
    fn texts(
        &self,
        prompt: &str,
        answer: &str,
        tokenizer: &Tokenizer,
    ) -> Result<ChatTokens, ChatLineError> {
        let end = tokenizer.special().eos.or(tokenizer.eod());
        let end = end.ok_or_else(|| ChatLineError::NoEnd(tokenizer.name().into()))?;
        let text = format!("{prompt}{answer}");
        let trained = match self.loss {
            TrainedTokens::All => 0..text.len(),
            TrainedTokens::Answers | TrainedTokens::Last => prompt.len()..text.len(),
        };
        let mut tokens = tokenizer.encode_with_offsets(&text, true)?;
        if tokens.last().is_some_and(|(token, _)| *token == end) {
            tokens.pop();
        }
        let mut marked = marked(tokens, &[trained]);
        marked.tokens.push(end);
        marked.is_answer.push(true);
        Ok(marked)
    }

    /// Returns the rendered text. Its answers are the trained ranges.
    fn rendered(
        &self,
        template: &ChatTemplate,
        conversation: &mut Conversation,
    ) -> Result<RenderedChat, ChatLineError> {
        if let Some((messages, texts)) = conversation.with_argument_texts.take() {
            let chat = Chat {
                messages: &messages,
                tools: conversation.tools.as_ref(),
                variables: conversation.variables.as_ref(),
            };
            // Some templates write arguments as text, and others write a map as JSON.
            let rendered = template.render(&chat, false);
            if rendered.is_ok_and(|rendered| tools::are_written(&texts, &rendered.text)) {
                conversation.messages = messages;
            }
        }
        let answers: Vec<usize> = match self.loss {
            TrainedTokens::Last => conversation.answers().next_back().into_iter().collect(),
            _ => conversation.answers().collect(),
        };
        if let (TrainedTokens::Last, [last]) = (self.loss, &answers[..]) {
            conversation.messages.truncate(last + 1);
        }
        let conversation = &*conversation;
        let render = |messages: usize, prompt: bool| {
            let chat = Chat {
                messages: &conversation.messages[..messages],
                tools: conversation.tools.as_ref(),
                variables: conversation.variables.as_ref(),
            };
            template.render(&chat, prompt)
        };
        let mut rendered = render(conversation.messages.len(), false)?;
        if let Some(at) = conversation.left_out(&rendered.text) {
            return Err(ChatLineError::Parts { message: at + 1 });
        }
        rendered.answers = match self.loss {
            TrainedTokens::All => std::iter::once(0..rendered.text.len()).collect(),
            _ if template.marks_answers() => chosen(&rendered.answers, conversation, &answers)?,
            _ => {
                let spans = answers.iter().map(|at| {
                    let before = render(*at, true)?.text;
                    let through = render(at + 1, false)?.text;
                    span(&before, &through, &rendered.text, at + 1)
                });
                spans.collect::<Result<_, _>>()?
            }
        };
        Ok(rendered)
    }
}

/// Returns the range of text that an answer adds after the text before it.
fn span(
    before: &str,
    through: &str,
    all: &str,
    message: usize,
) -> Result<Range<usize>, ChatLineError> {
    let differs = |follows| ChatLineError::NoPrefix { message, follows };
    if !all.starts_with(through) {
        return Err(differs("other messages follow it"));
    }
    if !through.starts_with(before) {
        return Err(differs("it follows"));
    }
    Ok(before.len()..through.len())
}

/// Returns the marked ranges of these answers.
fn chosen(
    marked: &[Range<usize>],
    conversation: &Conversation,
    answers: &[usize],
) -> Result<Vec<Range<usize>>, ChatLineError> {
    let all: Vec<usize> = conversation.assistant().collect();
    if all == answers {
        // A template may mark parts of a message.
        return Ok(marked.to_vec());
    }
    if all.len() != marked.len() {
        let (marked, answers) = (marked.len(), all.len());
        return Err(ChatLineError::Marks { marked, answers });
    }
    let pairs = all.iter().zip(marked);
    let trained = pairs.filter(|(at, _)| answers.contains(at));
    Ok(trained.map(|(_, range)| range.clone()).collect())
}

/// Marks tokens that overlap one of the ascending ranges, like `transformers`.
fn marked(tokens: Vec<(u32, Range<usize>)>, ranges: &[Range<usize>]) -> ChatTokens {
    let mut ranges = ranges.iter().peekable();
    let mut marked = ChatTokens::default();
    for (token, bytes) in tokens {
        while ranges.next_if(|range| bytes.start >= range.end).is_some() {}
        let overlaps = ranges.peek().is_some_and(|range| bytes.end > range.start);
        marked.tokens.push(token);
        marked.is_answer.push(overlaps);
    }
    marked
}

/// Returns whether each token overlaps one of the ranges.
#[cfg(test)]
pub(crate) fn mask(tokens: Vec<(u32, Range<usize>)>, ranges: &[Range<usize>]) -> Vec<bool> {
    marked(tokens, ranges).is_answer
}
