// The tool runner of Anthropic's client for JavaScript, whole and streamed, against the server at argv[2].
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { z } from "zod";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
for (const stream of [false, true]) {
  const asked = [];
  const weather = betaZodTool({
    name: "weather",
    description: "The weather",
    inputSchema: z.object({ city: z.string() }),
    run: ({ city }) => {
      asked.push(city);
      return `rain in ${city}`;
    },
  });
  const runner = client.beta.messages.toolRunner({
    model: "echo",
    max_tokens: stream ? 128_000 : 20_000,
    messages: [{ role: "user", content: "Is it raining in Oslo and in Rome?" }],
    tools: [weather],
    stream,
  });
  const message = await runner.runUntilDone();
  assert.deepEqual(asked, ["Oslo", "Rome"]);
  assert.equal(message.stop_reason, "end_turn");
  assert.equal(message.content[0].text, "It says rain in Rome.");
}
console.log("Anthropic's tool runner, JavaScript: 2 loops");
