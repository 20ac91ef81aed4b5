// The AI SDK with its provider for Ollama, whole and streamed, against the server at argv[2].
import assert from "node:assert/strict";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { createOllama } from "ollama-ai-provider-v2";
import { z } from "zod";

const ollama = createOllama({ baseURL: `${process.argv[2]}/api` });
for (const run of [generateText, streamText]) {
  const asked = [];
  const weather = tool({
    description: "The weather",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      asked.push(city);
      return `rain in ${city}`;
    },
  });
  const answer = await run({
    model: ollama("echo"),
    prompt: "Is it raining in Oslo and in Rome?",
    tools: { weather },
    toolChoice: "auto",
    maxOutputTokens: 4_000,
    temperature: 0.5,
    maxRetries: 0,
    stopWhen: stepCountIs(4),
    providerOptions: { ollama: { options: { num_ctx: 1_000_000, repeat_last_n: 64, num_predict: 1_000_000 } } },
    onError: ({ error }) => {
      throw error;
    },
  });
  assert.equal(await answer.text, "It says rain in Rome.");
  assert.deepEqual(asked, ["Oslo", "Rome"]);
  assert.equal((await answer.steps).length, 2);
}
console.log("AI SDK over Ollama: 2 loops");
